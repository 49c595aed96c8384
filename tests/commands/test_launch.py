"""`jaxshard launch` with commands that need no JAX: output, exit statuses, restarts, and that nothing is left over."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxshard.commands import supervisor
from jaxshard.commands.main import main
from tests.distributed.killing import alive

LAUNCH = [sys.executable, "-m", "jaxshard", "launch"]


def launch(*flags, script):
    """The exit status where every process runs a script of bash."""
    return main(["launch", *flags, "--", "bash", "-c", script])


@pytest.fixture
def start():
    """Starts the command in a process of its own, which does not outlive the test whatever becomes of it.

    A shell without job control starts what runs in the background with Ctrl-C ignored; processes inherit that, and
    `launch` respects it. These processes get the usual handler, however the tests were started.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, before)

        def started(*args, **options):
            program = stack.enter_context(subprocess.Popen([*LAUNCH, *args], **options))
            stack.callback(program.kill)
            return program

        yield started


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_lines_keep_their_stream_and_stay_whole(capfd):
    script = 'for i in 1 2 3; do printf "out"; sleep 0.03; printf "put $i\\n"; echo oops >&2; done; printf "no newline"'
    assert launch("-n", "3", script=script) == 0
    out, err = capfd.readouterr()
    expected = ["output 1", "output 2", "output 3", "no newline"]
    for index in range(3):
        assert [line[4:] for line in out.splitlines() if line.startswith(f"[{index}] ")] == expected
    assert len(out.splitlines()) == 12 and out.endswith("\n")
    assert sorted(err.splitlines()) == [f"[{index}] oops" for index in range(3) for _ in range(3)]


def test_every_process_knows_the_others(capfd):
    assert launch("-n", "2", script="env | grep ^JAXSHARD_") == 0
    lines = capfd.readouterr().out.splitlines()
    for index in (0, 1):
        env = dict(line[4:].split("=") for line in lines if line.startswith(f"[{index}]"))
        assert env["JAXSHARD_PROCESS_ID"] == str(index) and env["JAXSHARD_NUM_PROCESSES"] == "2"
        assert env["JAXSHARD_RESTARTS"] == "0"
    assert len({line[4:] for line in lines if re.search(r"COORDINATOR_ADDRESS=localhost:\d+$", line)}) == 1


@pytest.mark.parametrize(("end", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_the_status_is_that_of_the_first_failure_and_the_others_are_ended(end, status, tmp_path, capfd):
    # The others, and what they started, would take minutes.
    others = f"sleep 1000 & echo $$ $! > {tmp_path}/$JAXSHARD_PROCESS_ID; trap 'exit 9' TERM; wait"
    one = f"while [ ! -e {tmp_path}/0 -o ! -e {tmp_path}/2 ]; do sleep 0.02; done; {end}"
    started = time.monotonic()
    assert launch("-n", "3", script=f"if [ $JAXSHARD_PROCESS_ID = 1 ]; then {one}; else {others}; fi") == status
    assert time.monotonic() - started < 30
    left = [int(pid) for index in "02" for pid in (tmp_path / index).read_text().split()]
    assert len(left) == 4
    wait_until(lambda: not any(map(alive, left)), seconds=5)  # killed, but the kernel takes its time
    assert "process 1 " in capfd.readouterr().err


def test_those_that_ignore_sigterm_are_killed(monkeypatch):
    monkeypatch.setattr(supervisor, "SECONDS_TO_END", 0.3)
    script = "trap '' TERM; if [ $JAXSHARD_PROCESS_ID = 0 ]; then exit 3; fi; while true; do sleep 0.05; done"
    assert launch("-n", "2", script=script) == 3


def test_a_port_is_given_once(monkeypatch):
    ports = iter([4001, 4001, 4002])

    class Bound(socket.socket):
        def getsockname(self):
            return "", next(ports)

    monkeypatch.setattr(supervisor, "_GIVEN", set())
    monkeypatch.setattr(socket, "socket", Bound)
    found = []
    for _ in range(2):
        with supervisor._reserved_port() as port:
            found.append(port)
    assert found == [4001, 4002]


def test_all_are_started_again_on_another_port(capfd):
    script = "echo $JAXSHARD_RESTARTS $JAXSHARD_COORDINATOR_ADDRESS; [ $JAXSHARD_RESTARTS = 2 ] || kill -9 $$"
    assert launch("-n", "2", "--max-restarts", "5", script=script) == 0
    out, err = capfd.readouterr()
    attempts = {line[4:] for line in out.splitlines()}
    assert len(attempts) == 3 and len({attempt.split()[1] for attempt in attempts}) == 3
    assert err.count("starting all again") == 2 and "2 of 5" in err


@pytest.mark.parametrize(("status", "starts"), [(5, 3), (2, 1)])
def test_restarts_are_counted_and_wrong_usage_is_not_tried_again(status, starts, capfd):
    assert launch("-n", "1", "--max-restarts", "2", script=f"echo started; exit {status}") == status
    assert capfd.readouterr().out == "[0] started\n" * starts


def test_after_wrong_usage_the_others_end_by_themselves(tmp_path, capfd):
    """Processes that were given different things all say what it is, though one of them is the first to end."""
    others = f"while [ ! -e {tmp_path}/first ]; do sleep 0.01; done; sleep 0.5; echo it differs; exit 2"
    script = f"if [ $JAXSHARD_PROCESS_ID = 1 ]; then touch {tmp_path}/first; exit 2; fi; {others}"
    assert launch("-n", "3", "--max-restarts", "2", script=script) == 2
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] it differs", "[2] it differs"]


def test_after_wrong_usage_nobody_is_left(monkeypatch):
    monkeypatch.setattr(supervisor, "SECONDS_TO_SAY_SO", 0.2)
    started = time.monotonic()
    assert launch("-n", "2", script="if [ $JAXSHARD_PROCESS_ID = 1 ]; then exit 2; fi; sleep 1000") == 2
    assert time.monotonic() - started < 60


def test_flags_after_the_double_dash_are_the_commands_own(capfd):
    assert main(["launch", "-n", "1", "--", "echo", "-n", "7", "--", "--help"]) == 0
    assert capfd.readouterr().out == "[0] 7 -- --help\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "2", "--", "no-such-command", "x"], "no-such-command: there is no such command on PATH"),
        (["-n", "2"], "jaxshard launch -n 2 -- jaxshard train"),
    ],
)
def test_what_cant_be_run(flags, message, capsys):
    assert main(["launch", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_command_beside_this_python_needs_no_path(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/bin/bash")
    monkeypatch.setattr(supervisor, "_argv", list)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "-n", "1", "--", "echo", "found"]) == 0
    assert capfd.readouterr().out == "[0] found\n"


def test_signals_are_the_callers_again():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert launch("-n", "1", script="true") == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGTERM, 0, "saved"), (signal.SIGINT, 130, "stopped")])
def test_sigterm_and_interrupts_are_passed_on(number, status, word, start, tmp_path):
    script = f"""
        trap 'echo saved; exit 0' TERM
        trap 'echo stopped; exit 130' INT
        touch {tmp_path}/$JAXSHARD_RESTARTS$JAXSHARD_PROCESS_ID
        while true; do sleep 0.05; done"""
    program = start("-n", "2", "--max-restarts", "3", "--", "bash", "-c", script, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    program.send_signal(number)
    out, _ = program.communicate(timeout=60)
    assert program.returncode == status and sorted(out.splitlines()) == [f"[0] {word}", f"[1] {word}"]
    assert len(list(tmp_path.iterdir())) == 2, "it was started again"


@pytest.mark.slow
@pytest.mark.parametrize(("pause", "status"), [(0.1, 0), (2.5, 137)])
def test_a_second_sigterm_is_meant_unless_it_comes_with_the_first(pause, status, start, tmp_path):
    script = f"trap 'touch {tmp_path}/told' TERM; touch {tmp_path}/there; for i in {{1..60}}; do sleep 0.1; done"
    program = start("-n", "1", "--", "bash", "-c", script)
    wait_until(lambda: (tmp_path / "there").exists())
    program.terminate()
    wait_until(lambda: (tmp_path / "told").exists())
    time.sleep(pause)
    program.terminate()
    assert program.wait(timeout=30) == status


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel of Linux")
def test_the_processes_are_its_children_and_die_with_it(start, tmp_path):
    script = f"trap '' TERM; touch {tmp_path}/$$; while true; do sleep 0.05; done"
    program = start("-n", "2", "--", "bash", "-c", script)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    children = {int(file.name) for file in tmp_path.iterdir()}
    tasks = Path(f"/proc/{program.pid}/task").glob("*/children")
    assert {int(pid) for task in tasks for pid in task.read_text().split()} == children
    program.kill()
    program.wait()
    wait_until(lambda: not any(map(alive, children)))


def test_an_output_that_nobody_reads_ends_nothing(start, tmp_path):
    script = f"for i in $(seq 20000); do echo a line that nobody reads $i; done; touch {tmp_path}/done"
    reader, writer = os.pipe()
    program = start("-n", "1", "--", "bash", "-c", script, stdout=writer)
    os.close(writer)
    os.close(reader)
    assert program.wait(timeout=60) == 0 and (tmp_path / "done").exists()


def test_it_does_not_import_jax():
    """It stays while what it launched comes and goes."""
    code = "import sys; from jaxshard.commands.main import main; main(sys.argv[1:]); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "launch", "-n", "1", "--", "true"], check=False).returncode == 0
