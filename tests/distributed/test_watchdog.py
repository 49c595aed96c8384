"""The watchdog: what counts as a step, who is accused, and how a run ends."""

import importlib
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.distributed import watchdog as module
from jaxshard.distributed.watchdog import Beat, Watchdog, name_culprits, write_report
from tests.distributed.store import members, together


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    return clock


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses of processes that would have ended."""
    statuses = []
    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=statuses.append, write=module.os.write))
    return statuses


def test_the_limit_follows_the_median_and_the_first_step_has_none(clock):
    watchdog = Watchdog(least=60, factor=10)
    clock.now = 1000
    assert watchdog.limit == float("inf")
    watchdog(1, None)
    assert watchdog.limit == 600
    for number, seconds in enumerate([5, 20, 8, 7, 300], 2):
        clock.now += seconds
        watchdog(number, None)
    assert watchdog.limit == 80
    for number in range(7, 207):
        clock.now += 1
        watchdog(number, None)
    assert watchdog.limit == 60


def test_fit_pauses_it_for_evaluation_and_callbacks(clock):
    def step(run, batch):
        clock.now += 2
        return run._replace(step=run.step + 1), {"loss": jnp.float32(0)}

    def evaluate(run):
        clock.now += 100
        return {"loss": 0.0}

    def save(number, run):
        clock.now += 50

    watchdog = Watchdog(least=1, factor=10)
    run = js.TrainState(jnp.int32(0), {}, (), (), jax.random.key(0))
    batches = [{"x": np.ones((1, 1))}] * 6
    js.fit(run, step, batches, steps=6, evaluate=evaluate, eval_every=2, on_run=[save, watchdog, save])
    assert list(watchdog._times) == [2.0] * 5


def beat(step, *, waits=True, number=0, seconds=70.0, paused=False):
    return Beat(number, step, seconds, paused, waits, "data.py:30 read")


@pytest.mark.parametrize(
    ("beats", "silent", "expected"),
    [
        ({0: ("a", beat(5)), 1: ("b", beat(5)), 2: ("c", None)}, [2], "held up by c: silent"),
        ({0: ("a", beat(5)), 1: ("b", beat(4)), 2: ("c", beat(5, waits=False))}, [], "held up by b: has not finished"),
        ({0: ("a", beat(5)), 1: ("b", beat(5, waits=False))}, [], "held up by b: busy with something else"),
        ({0: ("a", beat(5, waits=False)), 1: ("b", beat(5, waits=False))}, [], "all are busy"),
        ({0: ("a", beat(5)), 1: ("b", beat(5))}, [], "a device or the network between them hangs"),
    ],
)  # fmt: skip
def test_who_is_accused(beats, silent, expected):
    assert expected in name_culprits(beats, silent)
    text = write_report(beat(5), 60.0, beats, silent)
    assert text.startswith("jaxshard: watchdog: step 6 takes 70 s, more than the limit of 60 s\n")
    assert "a: step 5 done 70 s ago" in text and "at data.py:30 read" in text


def test_the_step_and_the_records_are_marked():
    """The hang reports rely on it: these are ours where a process waits for the others."""
    for name in ("step", "records"):
        importlib.import_module(f"jaxshard.training.{name}")
    marked = {(Path(code.co_filename).name, code.co_name) for code in module._waiting}
    assert {file for file, _ in marked} >= {"step.py", "records.py"}


def test_a_step_that_hangs_ends_the_process(ended, capfd):
    with Watchdog(least=0.2, factor=1) as watchdog:
        watchdog(7, None)
        time.sleep(0.05)
        watchdog(8, None)
        give_up = time.monotonic() + 60
        while not ended and time.monotonic() < give_up:
            time.sleep(0.05)
    assert ended == [75]
    text = capfd.readouterr().err
    assert "watchdog: step 9 takes 0 s, more than the limit of 0 s" in text
    assert "this process: step 8 done" in text and "is busy at test_watchdog.py" in text
    assert "most recent call first" in text and "test_a_step_that_hangs_ends_the_process" in text


def in_two_processes(monkeypatch, second, *, hears=True):
    """What two watchdogs report: the first process waits for the second, which does this in its third step."""
    monkeypatch.setattr(module, "_INTERVAL", 0.1)
    monkeypatch.setattr(module, "_FAREWELL", 2.0)
    peers, local = members(2), threading.local()
    rooms = iter(["watch/0"] * 2)
    monkeypatch.setattr(module, "all_peers", lambda: peers[local.number])
    monkeypatch.setattr(module, "_rooms", rooms)
    reached, over = threading.Barrier(2), threading.Event()

    def process(number):
        local.number = number
        with Watchdog(least=0.3, factor=1) as watchdog:
            for step in (1, 2):
                reached.wait()
                watchdog(step, None)
            if number == 1:
                second(watchdog)
                over.set()
            else:
                over.wait(60)

    assert together([partial(process, 0), partial(process, 1)]) == [None, None]


def test_all_processes_end_and_name_the_one_that_is_behind(monkeypatch, ended, capfd):
    def second(watchdog):
        give_up = time.monotonic() + 60
        while len(ended) < 2 and time.monotonic() < give_up:
            time.sleep(0.05)

    monkeypatch.setattr(module, "_JAX", threading.__file__)
    in_two_processes(monkeypatch, second)
    assert ended == [75, 75]
    text = capfd.readouterr().err
    assert text.count("held up by process 1 (host b): busy with something else while the others wait") == 2
    assert text.count("stacks of this process, which ends with status 75") == 2


@pytest.mark.slow
def test_nobody_is_accused_while_a_process_saves(monkeypatch, ended, capfd):
    def second(watchdog):
        with watchdog.paused():
            time.sleep(2)

    in_two_processes(monkeypatch, second)
    assert ended == []
    text = capfd.readouterr().err
    assert text.count("for process 1 (host b): evaluates, saves or prints") == 1 and "held up" not in text


@pytest.mark.parametrize("options", [{"least": 0}, {"factor": 0.5}])
def test_limits_that_no_step_could_keep(options):
    with pytest.raises(ValueError, match="least must be positive and factor at least 1"):
        Watchdog(**options)
