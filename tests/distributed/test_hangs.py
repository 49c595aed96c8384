"""Real processes that are late, hang, freeze or are told to stop. Every test would hang, or fail on gloo's 30 s."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import jaxshard as js
from tests.distributed.launched import processes

pytestmark = pytest.mark.slow(sampled=False)  # minutes each

TRAIN = """
    what, folder = sys.argv[1:]

    def late(point):
        if what == f"late {point}" and index == 1:
            time.sleep(40)

    late("init")
    if what == "fails" and index == 1:
        raise FileNotFoundError("no such data")
    run = js.init(init_fn, tx, made(), 0)
    step = js.make_step(loss_fn, tx, made(), engine=js.explicit())
    late("batches")

    class Slow(Ones):
        def rows(self, number, rows):
            if number == 20 and what == "data" and index == 1:
                time.sleep(1000)
            return super().rows(number, rows)

    batches = js.batches(Slow(), made())
    late("step")

    def callback(number, run):
        time.sleep(0.02)
        if number != 20:
            return
        if what == "told" and index == 1 or what == "all told":
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "twice" and index == 0:
            def twice():
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(3)
            threading.Thread(target=twice, daemon=True).start()
        if what == "twice" and index == 1:
            time.sleep(60)
        if what == "slow save" and index == 1:
            time.sleep(12)
        if what == "frozen" and index == 1:
            os.system(f"(sleep 30; kill -CONT {os.getpid()}) >/dev/null 2>&1 &")
            os.kill(os.getpid(), signal.SIGSTOP)

    steps = 400 if "told" in what else 40
    with js.Checkpointer(folder, made(), every=1000) as checkpointer, js.distributed.Preemption() as preemption:
        with js.distributed.Watchdog(least=5) as watchdog:
            run = js.fit(run, step, batches, steps=steps, on_run=[callback, checkpointer, preemption, watchdog])
        checkpointer.save(run)
    print("ended", int(run.step), preemption.told, flush=True)
"""


@pytest.mark.parametrize("point", ["init", "batches", "step"])
def test_a_process_may_be_late(point, tmp_path):
    first, second = processes(TRAIN, f"late {point}", str(tmp_path))
    assert (first.status, second.status) == (0, 0), (first, second)
    called = {"init": "js.init", "batches": "js.batches", "step": "the first step"}[point]
    assert re.search(rf"jaxshard: {called}: waiting for process 1.* since 20 s", first.err)
    assert "ended 40 None" in first.out and "ended 40 None" in second.out


def test_a_process_that_hangs_is_named_by_all_and_all_end(tmp_path):
    ended = processes(TRAIN, "data", str(tmp_path))
    assert [process.status for process in ended] == [75, 75], ended
    for process in ended:
        assert re.search(r"watchdog: step 21 takes \d+ s, more than the limit of 5 s", process.err)
        assert re.search(r"held up by process 1 \(host \S+\): busy with something else", process.err)
        assert "most recent call first" in process.err
    assert "in rows" in ended[1].err  # the stack of the thread that reads


def test_a_process_that_fails_is_named_by_the_one_that_waits_for_it(tmp_path):
    first, second = processes(TRAIN, "fails", str(tmp_path))
    assert (first.status, second.status) == (1, 1), (first, second)
    assert "FileNotFoundError: no such data" in second.err
    assert re.search(
        r"js.init: waited in vain .*\n  - process 1 \(host \S+\): FileNotFoundError: no such data", first.err
    )


def test_a_frozen_process_is_named(tmp_path):
    first = processes(TRAIN, "frozen", str(tmp_path))[0]
    assert first.status == 75, first
    assert re.search(r"held up by process 1 \(host \S+\): silent", first.err)


def test_a_slow_save_of_one_process_is_no_hang(tmp_path):
    ended = processes(TRAIN, "slow save", str(tmp_path))
    assert [process.status for process in ended] == [0, 0], ended
    assert re.search(r"step 21 waits since \d+ s for process 1 \(host \S+\): evaluates, saves", ended[0].err)


@pytest.mark.parametrize("what", ["told", "all told"])
def test_sigterm_to_one_process_or_all_ends_all_after_a_common_saved_step(what, tmp_path):
    ended = processes(TRAIN, what, str(tmp_path))
    assert [process.status for process in ended] == [0, 0], ended
    steps = {re.search(r"ended (\d+) process \d", process.out)[1] for process in ended}
    assert len(steps) == 1 and 20 <= int(*steps) < 400 and js.latest_step(tmp_path, intact=True) == int(*steps)


def test_a_second_sigterm_ends_a_process_that_hangs_in_a_collective(tmp_path):
    assert processes(TRAIN, "twice", str(tmp_path))[0].status == 143


@pytest.mark.parametrize("launcher", [[], ["launch", "-n", "2", "--", sys.executable, "-m", "jaxshard"]])
def test_jaxshard_train_is_stopped_and_goes_on(launcher, tmp_path):
    folder, result = tmp_path / "run", tmp_path / "result.json"
    flags = ["--batch", "8", "--seq", "16", "--sample", "0", "--checkpoint", str(folder), "--json", str(result)]
    command = [sys.executable, "-m", "jaxshard", *launcher, "train", *flags, "--resume", "--checkpoint-every", "5"]
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
    if not launcher:  # which itself ends with the status of the signal that it passed on
        assert program.returncode == 0, output
    step = js.latest_step(folder, intact=True)
    assert f"stopped by SIGTERM after step {step} of 5000; --resume goes on" in output, output
    found = json.loads(result.read_text())
    assert found["stopped"] and found["start"] == 0 and len(found["losses"]) == step
    subprocess.run([*command, "--steps", str(step + 2)], env=environment, check=True, capture_output=True, timeout=200)
    found = json.loads(result.read_text())
    assert not found["stopped"] and found["start"] == step and len(found["losses"]) == 2
