"""Comparing snapshots that are written by hand: what must not be overlooked."""

from dataclasses import replace

import pytest

from jaxshard.plan.guard.changes import compare
from jaxshard.plan.guard.snapshot import Given, Moved, Snapshot

GATHER = Moved("data", "all-gather", "weight", "f32[16384,16384]", 1, 2**30, 0, "model.py:1")
SUM = Moved("data", "all-reduce", "gradient", "f32[64,64]", 1, 2**14, 0, "model.py:2")
PARAMETER = Given("parameter", "f32[64,64]", "data,-", 1, 2**11, "params['w']")
OLD = Snapshot(mesh={"data": 8}, compiler="tpu", collectives=(GATHER, SUM), arguments=(PARAMETER,), flops=100)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        # A lost sum makes the step wrong, whatever its size.
        (replace(OLD, collectives=(GATHER,)), "no longer all-reduced over data, 16.38 kB before"),
        # Of the same shape, but no gradient.
        (replace(OLD, collectives=(GATHER, replace(SUM, moves="activation"))), "no longer all-reduced"),
        (replace(OLD, collectives=(replace(GATHER, count=None, bytes=None, waited=None), SUM)), "? times"),
        (replace(OLD, arguments=(replace(PARAMETER, split="?"),)), "stored in a way that is not known"),
        (replace(OLD, flops=None), "FLOPs of products: not known any more, 100 before"),
        (replace(OLD, flops=50), "FLOPs of products: 50 instead of 100"),
    ],
)
def test_a_change_is_never_overlooked(new, said):
    changes, _ = compare(OLD, new)
    assert [one.text for one in changes if said in one.text], changes
    assert not compare(OLD, OLD)[0]


def test_many_small_arrays_count_together():
    each = [Given("parameter", f"f32[{100 + i},100]", "data,-", 1, 50_000, f"w{i}") for i in range(60)]
    large = Given("optimizer state", "f32[16384,16384]", "data,-", 1, 2**30, "mu")
    old = replace(OLD, arguments=(large, *each))
    new = replace(OLD, arguments=(large, *(replace(one, split="-,-", bytes=400_000) for one in each)))
    (change,) = compare(old, new)[0]
    assert change.text.startswith("60 of the parameters") and "stored replicated, 24.00 MB" in change.text
