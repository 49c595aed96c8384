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
from tests.distributed.launched import processes

pytestmark = pytest.mark.slow(sampled=False)  # minutes each

TRAIN = """
    what, folder = sys.argv[1:]
    run = js.init(init_fn, tx, made(), 0)
    step = js.make_step(loss_fn, tx, made(), engine=js.explicit())

    class Slow(Ones):
        def rows(self, number, rows):
            if number == 20 and what == "hangs" and index == 1:
                time.sleep(1000)
            return super().rows(number, rows)

    def callback(number, run):
        time.sleep(0.02)
        if number == 20 and what == "told" and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    steps, batches = 400 if what == "told" else 40, js.batches(Slow(), made())
    with js.Checkpointer(folder, made(), every=1000) as checkpointer, js.distributed.Preemption() as preemption:
        with js.distributed.Watchdog(least=5) as watchdog:
            run = js.fit(run, step, batches, steps=steps, on_run=[callback, checkpointer, preemption, watchdog])
        checkpointer.save(run)
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


def test_sigterm_to_one_process_ends_all_after_a_common_saved_step(tmp_path):
    ended = processes(TRAIN, "told", str(tmp_path))
    assert [process.status for process in ended] == [0, 0], ended
    steps = {re.search(r"ended (\d+) process \d", process.out)[1] for process in ended}
    assert len(steps) == 1 and 20 <= int(*steps) < 400 and js.latest_step(tmp_path, intact=True) == int(*steps)


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
