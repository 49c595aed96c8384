"""The ledger of wall time: what is counted as what, over kills and restarts too, and files that are no ledger."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.commands.main import main
from jaxshard.training.goodput import KINDS, Goodput, Ledger
from jaxshard.training.goodput_file import LEDGER, kept_on_disk, read_goodput, read_ledger
from tests.checkpoint import small


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def spent(ledger):
    return {kind: seconds for kind, seconds in ledger.goodput.seconds.items() if seconds}


def take(ledger, clock, steps, *, wait=0.5, step=2.0):
    """Takes steps as `fit` does."""
    for number in steps:
        ledger.spend("input wait")
        clock.now += wait
        ledger.spend("steps")
        clock.now += step
        ledger.took(number)
    ledger.spend("callbacks")


# What is counted as what


def test_every_second_is_of_one_kind():
    clock = Clock()
    ledger = Ledger(0, age=8.0, compiled=5.0, now=clock)
    take(ledger, clock, range(1, 5))
    ledger.spend("evaluation")
    clock.now += 4.0
    ledger.spend("steps")
    ledger.move("steps", "compile", 1.5)
    assert spent(ledger) == {"start": 3.0, "compile": 6.5, "input wait": 2.0, "steps": 6.5, "evaluation": 4.0}
    assert ledger.share == ledger.goodput.share == 6.5 / 22
    clock.now -= 3600  # a clock may be set back
    ledger.spend("input wait")
    assert ledger.goodput.total == 22


def test_steps_after_the_one_that_a_run_goes_back_to_are_lost():
    clock = Clock()
    ledger = Ledger(0, now=clock)
    take(ledger, clock, range(1, 8), wait=0.0)
    clock.now += 3.0  # the restore
    ledger.go_back(4)
    assert spent(ledger) == {"steps": 8.0, "lost steps": 9.0}
    take(ledger, clock, range(5, 10), wait=0.0)
    ledger.go_back(2)
    assert spent(ledger) == {"steps": 4.0, "lost steps": 23.0}


def test_the_steps_of_a_long_training_are_found_again_from_few_marks():
    clock = Clock()
    ledger = Ledger(0, now=clock)
    take(ledger, clock, range(1, 10_001), wait=0.0)
    assert len(ledger.account().marks) < 700
    ledger.go_back(1234)
    assert spent(ledger)["steps"] == pytest.approx(2 * 1234)


def test_a_later_process_goes_on_and_an_ended_training_begins_anew():
    clock = Clock()
    first = Ledger(0, age=3.0, now=clock)
    take(first, clock, range(1, 8), wait=0.0)
    killed = first.account()
    clock.now += 40.0
    second = Ledger(5, past=killed, age=30.0, compiled=12.0, now=clock)  # its own start is a part of the restart
    assert spent(second) == {"start": 3.0, "steps": 10.0, "lost steps": 4.0, "restart": 28.0, "compile": 12.0}
    take(second, clock, range(6, 9), wait=0.0)
    second.ended = True
    ended = second.account()
    clock.now += 1e6  # until somebody trains on
    third = Ledger(8, past=ended, age=7.0, now=clock)
    assert spent(third) == {"start": 10.0, "steps": 16.0, "lost steps": 4.0, "restart": 28.0, "compile": 12.0}
    assert spent(Ledger(0, past=ended, age=7.0, now=clock)) == {"start": 7.0}


def test_a_step_that_a_kill_interrupts_is_lost_and_nothing_else():
    clock = Clock()
    ledger = Ledger(3, now=clock)
    take(ledger, clock, range(4, 7), wait=0.0)
    ledger.spend("steps")
    clock.now += 1.5
    assert spent(Ledger(6, past=ledger.account(), now=clock)) == {"steps": 6.0, "lost steps": 1.5}
    # Steps that were saved after the last word about them count as what they were.
    assert spent(Ledger(7, past=ledger.account(), now=clock)) == {"steps": 7.5}


def test_it_prints_as_one_line_with_the_largest_first():
    goodput = Goodput(dict.fromkeys(KINDS, 0.0) | {"steps": 90.0, "start": 2.0, "compile": 8.0, "restart": 0.01})
    assert str(goodput) == "goodput 90.0% of 0:01:40: compile 8.0 s, start 2.0 s"
    assert str(Goodput(dict.fromkeys(KINDS, 0.0))) == "goodput 0.0% of 0:00:00"


# In fit


class Keeps:
    """A callback that names a ledger, as js.Checkpointer does, and saves nothing."""

    def __init__(self, ledger):
        self.ledger = ledger

    def restore(self):
        pass

    def __call__(self, number, run):
        time.sleep(0.2)


def new_run(step=0):
    return js.TrainState(jnp.int32(step), {"w": jnp.float32(0)}, (), (), jax.random.key(0))


def plain_step(run, batch):
    time.sleep(0.1)
    run = run._replace(step=run.step + 1)
    return run, {"loss": run.step.astype(jnp.float32)}


BATCHES = [{"x": np.ones((4, 2), np.float32)}] * 100


def slow(seconds, result):
    time.sleep(seconds)
    return result


@pytest.mark.slow
def test_fit_counts_and_the_records_have_it(tmp_path):
    history, file = [], tmp_path / LEDGER
    run = js.fit(
        new_run(), plain_step, (slow(0.05, batch) for batch in BATCHES), steps=4, callbacks=[history.append],
        on_run=[Keeps(file)], evaluate=lambda run: slow(0.3, {"loss": 1.0}),
    )  # fmt: skip
    seconds = read_goodput(file).seconds
    expected = {"input wait": 0.2, "compile": 0.1, "steps": 0.3, "checkpoint wait": 0.8, "evaluation": 0.3}
    # Sleeps last at least as long as asked; the share of a record is that of its moment.
    assert all(seconds[kind] > 0.99 * least for kind, least in expected.items())
    assert 0 < history[-1].speed["goodput"] < 1
    before = sum(seconds.values())
    js.fit(run, plain_step, BATCHES, steps=6, on_run=[Keeps(file)])
    after = read_goodput(file).seconds
    assert after["steps"] > seconds["steps"] + 0.09 and sum(after.values()) > before + 0.6
    assert after["restart"] == after["lost steps"] == 0


@pytest.mark.slow
def test_an_exception_is_followed_by_a_restart(tmp_path):
    file = tmp_path / LEDGER

    def end(number, run):
        assert number < 3, "it ends"

    with pytest.raises(AssertionError, match="it ends"):
        js.fit(new_run(), plain_step, BATCHES, steps=6, on_run=[Keeps(file), end])
    assert not json.loads(file.read_text())["ended"]
    js.fit(new_run(1), plain_step, BATCHES, steps=6, on_run=[Keeps(file)])
    seconds = read_goodput(file).seconds
    assert seconds["restart"] > 0 and 0.15 < seconds["lost steps"] < seconds["steps"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1, "seconds": {}}',
        '{"format": 2}',
        "[" * 100_000,
        json.dumps({"format": 1, "seconds": dict.fromkeys(KINDS, -1), "marks": [[0, 0]], "written": 1, "ended": True}),
        json.dumps({"format": 1, "seconds": dict.fromkeys(KINDS, 1), "marks": [], "written": 1, "ended": True}),
        json.dumps({"format": 1, "seconds": dict.fromkeys(KINDS, 1), "marks": [[3, 0], [1, 1]], "written": 1}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_ledger_is_reported_once_and_replaced(content, tmp_path):
    file = tmp_path / LEDGER
    file.write_text(content)
    with pytest.warns(UserWarning, match=r"a new goodput ledger replaces.*\.goodput\.json: this is not the ledger"):
        ledger = read_ledger(file, 0, compiled=0.0)
    with kept_on_disk(ledger, file):
        pass
    assert read_goodput(file).total < 3600 * 24


def test_a_ledger_that_cant_be_written_does_not_stop_the_training(tmp_path):
    keeps = Keeps(tmp_path / "no folder" / LEDGER)
    with pytest.warns(UserWarning, match=r"the goodput ledger .* is not up to date: No such file or directory"):
        run = js.fit(new_run(), plain_step, BATCHES, steps=2, on_run=[keeps])
    assert int(run.step) == 2


def test_a_checkpointer_keeps_it_beside_the_steps(tmp_path):
    layout = small.layout()
    with js.Checkpointer(tmp_path, layout, every=1, keep=1) as checkpointer:
        run = js.fit(small.new_run(), plain_step, [small.BATCH] * 3, steps=3, on_run=[checkpointer])
    assert js.latest_step(tmp_path) == 3 and sorted(path.name for path in tmp_path.iterdir()) == [LEDGER, "3"]
    described = js.describe(run, layout, folder=tmp_path)
    assert described.goodput == read_goodput(tmp_path / LEDGER)
    assert f"wall time         {described.goodput}" in str(described)
    assert js.describe(run, layout, folder=tmp_path / "3").goodput is js.describe(run, layout).goodput is None


def test_launch_prints_what_its_processes_counted(tmp_path, capfd):
    file = tmp_path / LEDGER
    with kept_on_disk(Ledger(0, age=8.0), file):
        pass
    assert main(["launch", "-n", "1", "--", "bash", "-c", f"ln -s {file} $JAXSHARD_GOODPUT"]) == 0
    assert re.fullmatch(r"jaxshard launch: goodput 0\.\d% of 0:00:08: start 8\.0 s\n", capfd.readouterr().err)
    file.write_text("{")
    assert main(["launch", "-n", "1", "--", "bash", "-c", f"cp {file} $JAXSHARD_GOODPUT"]) == 0
    assert "the goodput can't be read: " in capfd.readouterr().err
    assert main(["launch", "-n", "1", "--", "true"]) == 0
    assert capfd.readouterr().err == ""


# Real processes


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jaxshard as js
from jaxshard.checkpoint import checkpointer as saving
from tests.checkpoint import small

folder, begin_save = Path(sys.argv[1]), saving.begin_save

def begin_slow_save(*args):
    finish = begin_save(*args)
    return lambda: (time.sleep(3.5), finish())[1]  # a slow disk

saving.begin_save = begin_slow_save
layout, real, is_second = small.layout(), small.step(), js.latest_step(folder) is not None

def step(run, batch):
    time.sleep(0.4)
    return real(run, batch)

def batches(first):
    for number in range(first, 100):
        if number == 3:
            time.sleep(4)
        if number == 17 and not is_second:
            (folder.parent / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        yield small.BATCH

with js.Checkpointer(folder, layout, every=5) as checkpointer:
    run = js.restore(folder, layout) if is_second else small.new_run()
    done = int(run.step)
    (folder.parent / "begins").write_text(f"{done} {time.time()}")
    js.fit(run, step, batches(done + 1), steps=14 if is_second else 100, on_run=[checkpointer])
"""


@pytest.mark.slow
def test_the_ledger_agrees_with_what_was_injected(tmp_path):
    """A slow batch, slow saves and a kill. The first call of a step is compilation; the others take 0.4 s."""
    folder = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    def train():
        return subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], env=environment, check=False).returncode

    assert train() == -signal.SIGKILL
    killed = float((tmp_path / "killed").read_text())
    assert killed - json.loads((folder / LEDGER).read_text())["written"] < 1.0
    time.sleep(1)
    assert train() == 0
    done, begins = (tmp_path / "begins").read_text().split()
    seconds = read_goodput(folder / LEDGER).seconds
    assert done == "10"
    expected = {
        "input wait": 4.0,
        "checkpoint wait": 3.0,  # after 2 s of steps a save waits 1.5 s for the one before, at 10 and at 15
        "lost steps": 6 * 0.4,
        "restart": float(begins) - killed,
        "steps": 9 * 0.4 + 3 * 0.4,
        "evaluation": 0.0,
    }
    assert {kind: seconds[kind] for kind in expected} == pytest.approx(expected, abs=2.0)
