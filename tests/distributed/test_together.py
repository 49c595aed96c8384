"""An error of one process is raised in all of them, each with its own part of the message."""

import threading

import jax
import numpy as np
import pytest

from jaxshard.distributed import together
from tests.distributed.store import members
from tests.distributed.store import together as in_threads


@pytest.fixture
def simulated(monkeypatch):
    """`run(fn)` returns what `fn(index)` returned or raised in each of three threads that stand for processes."""
    here = threading.local()
    barrier, values = threading.Barrier(3), [0] * 3

    def allgather(value):
        assert value.dtype == np.int32
        values[here.index] = int(value)
        barrier.wait(10)
        gathered = np.array(values)
        barrier.wait(10)
        return gathered

    monkeypatch.setattr(together, "all_peers", lambda: here.peers)
    monkeypatch.setattr(together.multihost_utils, "process_allgather", allgather)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)

    def run(fn):
        def call(index, peers):
            here.index, here.peers = index, peers
            return fn(index)

        return in_threads([lambda i=i, peers=peers: call(i, peers) for i, peers in enumerate(members(3))])

    return run


def test_problems_of_one_process_are_raised_in_all(simulated):
    def check(index):
        together.raise_together(["b: cut off"] if index == 1 else [], KeyError, "bad files", point="reading")

    first, second, third = simulated(check)
    assert [type(error) for error in (first, second, third)] == [KeyError] * 3
    assert second.args == ("bad files\n  - b: cut off",)
    assert first.args == third.args == ("bad files\n  - process 1 found something wrong, and names it",)
    assert simulated(lambda index: together.raise_together([], KeyError, "bad files", point="reading")) == [None] * 3


def test_the_first_process_answers_for_all(simulated):
    called = []

    def ask(index, answer):
        return together.call_in_first_process(lambda: called.append(index) or answer, "preparing")

    assert simulated(lambda index: ask(index, True)) == [True] * 3
    assert simulated(lambda index: ask(index, False)) == [False] * 3
    assert called == [0, 0]


def test_an_error_of_the_first_process_is_raised_in_all(simulated):
    def fail():
        raise PermissionError("no permission")

    first, *others = simulated(lambda index: together.call_in_first_process(fail, "preparing"))
    assert isinstance(first, PermissionError)
    assert [str(error) for error in others] == ["preparing: process 0 failed, and says why"] * 2
    assert all(type(error) is OSError for error in others)


def test_a_process_on_its_own():
    assert together.gather_ints(7, "alone") == [7] and together.failed_processes(True, "alone") == [0]
    with pytest.raises(ValueError, match=r"wrong\n  - a$"):
        together.raise_together(["a"], ValueError, "wrong", point="alone")
    assert together.call_in_first_process(lambda: True, "alone") == 1
