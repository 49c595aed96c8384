"""Four processes save into an object store and are killed again and again; two others go on from there, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint.folder import step_folders
from jaxshard.storage.paths import as_path
from tests.checkpoint import small
from tests.checkpoint.runs import assert_same
from tests.distributed.launched import free_address

PROGRAM = """
    import json, sys
    import jax
    address, index, count, root, log, last = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import jaxshard as js
    from tests.checkpoint.objects.test_processes import Waves
    from tests.checkpoint.small import TX, init_fn, loss_fn
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=4), init_fn, TX)
    step = js.make_step(loss_fn, TX, layout)
    with js.Checkpointer(root, layout, every=1, keep=3) as checkpointer:
        begun = js.latest_step(root)
        run = js.init(init_fn, TX, layout, 0) if begun is None else js.restore(root, layout)
        batches = js.batches(Waves(), layout, start=run.step)
        for number in range(int(run.step) + 1, int(last) + 1):
            run, metrics = step(run, next(batches))
            if index == "0":
                with open(log, "a") as opened:
                    print(json.dumps([number, float(metrics["loss"]).hex()]), file=opened)
            checkpointer(number, run)
"""


class Waves:
    """A source of batches that are others in every step."""

    batch = 8

    def rows(self, step, rows):
        return {"x": np.sin(step + np.arange(64) * (1.0 + np.asarray(rows)[:, None])).astype(np.float32)}


def start(root, log, count, last):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), free_address()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen([*command, str(index), str(count), root, str(log), str(last)], env=environment)
        for index in range(count)
    ]


def lines(log):
    text = Path(log).read_text() if Path(log).exists() else ""
    return [tuple(json.loads(line)) for line in text.splitlines()]


def kill_one(processes, victim, log, after):
    """Kill a process once so many steps were taken; the launcher would then end the others."""
    enough = len(lines(log)) + after
    while len(lines(log)) < enough:
        assert all(process.poll() is None for process in processes), "it ended before"
        time.sleep(0.01)
    time.sleep(random.Random(enough).uniform(0.0, 0.3))
    for process in [processes[victim], *processes]:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def finish(processes):
    assert [process.wait(timeout=400) for process in processes] == [0] * len(processes)


def kills_change_nothing(tmp_path, root, kills):
    log, last = tmp_path / "log", 4 * kills + 8
    for number in range(kills):
        kill_one(start(root, log, 4, last), number % 4, log, 1 + number % 3)
    finish(start(root, log, 4, last))
    finish(start(root, log, 2, last + 3))  # two others go on
    for count, end in ((4, last), (2, last + 3)):
        finish(start(str(tmp_path / "undisturbed"), tmp_path / "undisturbed.log", count, end))
    losses, taken = dict(lines(tmp_path / "undisturbed.log")), lines(log)
    assert {step for step, _ in taken} == set(losses) and all(losses[step] == loss for step, loss in taken), taken
    assert len(taken) <= len(losses) + 2 * kills, "a kill costs the steps that were being saved"
    assert list(step_folders(as_path(root))) == [last + 1, last + 2, last + 3]
    mesh = js.make_mesh(jax.devices()[:4], data=4)
    layout = js.layout(js.fsdp("data", min_size=0), mesh, small.init_fn, small.TX)
    assert_same(js.restore(root, layout), js.restore(tmp_path / "undisturbed", layout))
    words = [sys.executable, "-m", "jaxshard", "checkpoint", "verify", root]
    answered = subprocess.run(words, check=True, capture_output=True, text=True, timeout=200)
    assert answered.stdout.count("intact") == 3, answered.stdout


@pytest.mark.slow
def test_kills_of_four_processes_that_save_into_an_object_store(tmp_path, bucket):
    kills_change_nothing(tmp_path, f"{bucket}/run", 2)


@pytest.mark.slow(sampled=False)  # many minutes
def test_twenty_kills_of_four_processes_that_save_into_an_object_store(tmp_path, bucket):
    kills_change_nothing(tmp_path, f"{bucket}/run", 20)
