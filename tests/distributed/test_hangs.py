"""Real processes of which one hangs or is told to stop: all end, and go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import jaxshard as js
from tests.distributed.launched import free_address, processes

pytestmark = pytest.mark.slow(sampled=False)  # minutes each

TRAIN = """
    what, folder = sys.argv[1:]
    run = js.init(init_fn, tx, made(), 0)

    def loss_that_is_traced(params, batch, key):
        if what == "compiles" and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss_fn(params, batch, key)

    step = js.make_step(loss_that_is_traced, tx, made(), engine=js.explicit())

    class Slow(Ones):
        def rows(self, number, rows):
            if number == 20 and what == "hangs" and index == 1:
                time.sleep(1000)
            return super().rows(number, rows)

    def callback(number, run):
        time.sleep(0.02)
        if number == 20 and what == "told" and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    steps, batches = 40 if what == "hangs" else 400, js.batches(Slow(), made())
    rule = js.EarlyStopping(patience=2) if what == "stops" else None
    judged = dict(evaluate=lambda run: {"loss": 1.0}, eval_every=8, stop=rule) if rule else {}
    with js.Checkpointer(folder, made(), every=1000) as checkpointer, js.distributed.Preemption() as preemption:
        with js.distributed.Watchdog(least=5) as watchdog:
            on_run = [callback, checkpointer, preemption, watchdog]
            run = js.fit(run, step, batches, steps=steps, on_run=on_run, **judged)
    print("ended", int(run.step), preemption.told, flush=True)
"""


def test_a_process_that_hangs_is_named_by_all_and_all_end(tmp_path):
    ended = processes(TRAIN, "hangs", str(tmp_path))
    assert [process.status for process in ended] == [75, 75], ended
    for process in ended:
        assert re.search(r"watchdog: step 21 takes \d+ s, more than the limit of 5 s", process.err)
        assert re.search(r"held up by process 1 \(host \S+\): busy with something else", process.err)
        assert "most recent call first" in process.err
    assert "in rows" in ended[1].err  # the stack of the thread that reads


@pytest.mark.parametrize(
    ("what", "first", "last", "told"), [("told", 20, 399, "[01]"), ("compiles", 1, 399, "1"), ("stops", 24, 24, "None")]
)
def test_all_processes_end_after_a_common_step_which_is_saved_with_one_ledger(what, first, last, told, tmp_path):
    """By SIGTERM to one process during the steps, or while the first one compiles; and by early stopping."""
    ended = processes(TRAIN, what, str(tmp_path))
    assert [process.status for process in ended] == [0, 0], ended
    lines = {process.out.strip().splitlines()[-1] for process in ended}
    (step,) = {int(line.split()[1]) for line in lines}
    assert first <= step <= last and js.latest_step(tmp_path, intact=True) == step, lines
    assert [file.name for file in tmp_path.rglob("*goodput*")] == [".goodput.json"]
    ledger = json.loads((tmp_path / ".goodput.json").read_text())
    assert ledger["marks"][-1][0] == step and ledger["ended"] == (what == "stops")


def test_jaxshard_train_in_two_processes_that_compiles_stops_after_its_first_step(tmp_path):
    """Also if the other process is not as far yet when the first one gets the signal."""
    flags = ["--batch", "8", "--seq", "16", "--steps", "500", "--sample", "0", "--checkpoint", str(tmp_path)]
    there = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONUNBUFFERED": "1"}
    there |= {"JAXSHARD_COORDINATOR_ADDRESS": free_address(), "JAXSHARD_NUM_PROCESSES": "2"}
    first, second = started = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxshard", "train", *flags],
            stdout=(subprocess.PIPE, subprocess.DEVNULL)[index], stderr=subprocess.STDOUT, text=True,
            env=os.environ | there | {"JAXSHARD_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        assert any("compiling ..." in line for line in first.stdout)
        first.terminate()
        output = first.communicate(timeout=200)[0]
        assert (first.returncode, second.wait(timeout=30)) == (0, 0), output
    finally:
        for process in started:
            process.kill()
    assert output.startswith("jaxshard: SIGTERM: ends after the first step, which may still compile"), output
    assert "stopped by SIGTERM after step 1 of 500; --resume goes on" in output, output
    assert js.latest_step(tmp_path, intact=True) == 1


def test_jaxshard_train_is_stopped_and_goes_on(tmp_path):
    folder, result = tmp_path / "run", tmp_path / "result.json"
    flags = ["--batch", "8", "--seq", "16", "--sample", "0", "--checkpoint", str(folder), "--json", str(result)]
    command = [sys.executable, "-m", "jaxshard", "train", *flags, "--resume", "--checkpoint-every", "5"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    program = subprocess.Popen(
        [*command, "--steps", "5000", "--eval-every", "5000"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + 200
        while js.latest_step(folder) is None and program.poll() is None and time.monotonic() < give_up:
            time.sleep(0.2)
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate(timeout=100)
    finally:
        program.kill()
    assert program.returncode == 0, output
    step = js.latest_step(folder, intact=True)
    assert f"stopped by SIGTERM after step {step} of 5000; --resume goes on" in output, output
    found = json.loads(result.read_text())
    assert found["stopped"] and found["start"] == 0 and len(found["losses"]) == step
    subprocess.run([*command, "--steps", str(step + 2)], env=environment, check=True, capture_output=True, timeout=200)
    found = json.loads(result.read_text())
    assert not found["stopped"] and found["start"] == step and len(found["losses"]) == 2
