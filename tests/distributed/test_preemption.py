"""SIGTERM: a run ends after a step, the same one in all processes."""

import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.distributed import preemption as module
from jaxshard.distributed.preemption import CommonStop, Preemption
from tests.distributed.store import members, together


def trained(on_run, steps=7):
    def step(run, batch):
        return run._replace(step=run.step + 1), {"loss": jnp.float32(0)}

    run = js.TrainState(jnp.int32(0), {}, (), (), jax.random.key(0))
    return js.fit(run, step, [{"x": np.ones((1, 1))}] * steps, steps=steps, on_run=on_run)


def test_one_process_ends_after_the_step_under_way(capsys):
    def told(number, run):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        run = trained([told, preemption])
    assert int(run.step) == 3 and preemption.stopped and preemption.told == "this process"
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1
    assert "SIGTERM: ends after the step under way" in capsys.readouterr().err


def test_a_signal_while_the_first_step_compiles_is_told_at_once_and_ends_after_that_step(capfd):
    told = []

    @jax.jit
    def step(run, batch):
        os.kill(os.getpid(), signal.SIGTERM)  # while it is traced
        time.sleep(0.3)
        told.append(capfd.readouterr().err)
        return run._replace(step=run.step + 1), {"loss": jnp.float32(0)}

    run = js.TrainState(jnp.int32(4), {}, (), (), jax.random.key(0))
    with Preemption() as preemption:
        run = js.fit(run, step, [{"x": np.ones((1, 1))}] * 3, steps=7, on_run=[preemption])
    assert told == ["jaxshard: SIGTERM: ends after the first step, which may still compile; another one ends at once\n"]
    assert int(run.step) == 5 and preemption.stopped


def test_a_run_that_is_not_told_ends_by_itself():
    with Preemption() as preemption:
        run = trained([preemption])
    assert int(run.step) == 7 and not preemption.stopped and preemption.told is None


def test_a_second_signal_ends_the_process_at_once_even_while_the_main_thread_waits(monkeypatch):
    ended = threading.Event()

    def leave(status):
        assert status == 143
        ended.set()

    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=leave))
    with Preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)  # one more from the launcher: the same
        assert not ended.wait(0.3)
        monkeypatch.setattr(module, "_ONE_SIGNAL", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(30)


@settings(deadline=None, max_examples=15)
@given(
    told=st.dictionaries(st.integers(0, 2), st.integers(1, 12), min_size=1),
    pauses=st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=3, max_size=3),
    lockstep=st.booleans(),
)
def test_all_processes_stop_after_the_same_step(told, pauses, lockstep):
    """Three processes whose steps wait for each other, or may run ahead as far as they like on their way."""
    steps, peers = 12, members(3)
    together_step = threading.Barrier(3)

    def process(number):
        stop, over = CommonStop(peers[number], "stop"), threading.Event()

        def listen():
            while not over.wait(pauses[number]):
                if told.get(number, steps + 1) <= stop._finished and stop.told is None:
                    stop.request()
                stop.find_last_step()

        thread = threading.Thread(target=listen)
        thread.start()
        last = steps
        for step in range(1, steps + 1):
            if lockstep:
                together_step.wait(30)
            time.sleep(0.002)
            if stop.is_last(step):
                last = step
                break
        over.set()
        thread.join()
        stop.announce_step()
        return last

    ends = together([partial(process, number) for number in range(3)])
    assert len(set(ends)) == 1, ends
    assert ends[0] >= min(told.values())


def test_a_process_that_is_through_holds_nobody_up():
    peers = members(2)
    first, second = CommonStop(peers[0], "stop"), CommonStop(peers[1], "stop")
    first.is_last(9)
    first.announce_step()
    second.is_last(8)
    second.request()
    second.find_last_step()
    assert not second.is_last(9) and second.is_last(10)
    assert second.told == "process 1 (host b)"
