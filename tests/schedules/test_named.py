"""The named schedules: valid by an independent check, with the bubbles and stashes of their formulas."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.schedules import Costs, Op, Schedule, gpipe, head_runs, interleaved, named, one_f_one_b, zero_bubble
from tests.schedules.tables import SPLITS, make, runs, sizes

costs = st.builds(Costs, st.floats(0.1, 10), st.floats(0.1, 10))


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [
        (gpipe(4, 16), 0.158),
        (one_f_one_b(4, 16), 0.158),
        (interleaved(4, 16), 0.086),
        (interleaved(4, 16, chunks=4), 0.045),
        (zero_bubble(4, 16), 0.059),
        (zero_bubble(4, 16, chunks=4), 0.0303),
    ],
)
def test_bubbles_of_4_stages_and_16_micro_batches(schedule, bubble):
    stats = schedule.stats()
    assert stats.bubble == pytest.approx(bubble, abs=5e-4 if bubble > 0.04 else 5e-5)
    assert stats.bubble_async <= stats.bubble + 1e-12 and stats.head_runs == 4


@pytest.mark.parametrize("name", SPLITS)
@given(size=sizes(p=6), cost=costs)
@settings(max_examples=10, deadline=None)
def test_every_operation_comes_once_and_after_its_inputs(name, size, cost):
    p, m, v = size
    schedule = make(name, *size)
    chunks = v if name in ("interleaved", "zero_bubble") else 1
    assert (schedule.stages, schedule.microbatches, schedule.chunks, schedule.name) == (p, m, chunks, name)
    assert schedule.splits_backward == SPLITS[name]
    assert runs(schedule.ops, p, m, chunks)
    assert schedule.ticks == max(op.tick for op in schedule.ops) + 1
    idle = (p - 1) / chunks
    work = m * (cost.F + cost.B) / (cost.F + cost.B / 2) if SPLITS[name] else m
    stats = schedule.stats(cost)
    assert stats.bubble == pytest.approx(idle / (work + idle), abs=1e-9)
    assert 0 <= stats.bubble_async <= stats.bubble + 1e-9


def first_backward(p, m, v):
    """The formula of the docstring, from the sizes of the groups."""
    if m % p == 0:
        return p * (v + 1) - 2
    groups = {m} if v == 1 else {m // (m // p), math.ceil(m / (m // p))}
    return p - 2 + max((v - 1) * g + math.ceil(g / math.ceil(g / p)) for g in groups)


@given(size=sizes())
@settings(max_examples=16, deadline=None)
def test_stashes_have_the_size_of_the_formula(size):
    p, m, v = size
    first = first_backward(p, m, v)
    schedule = interleaved(p, m, chunks=v)
    assert min(op.tick for op in schedule.ops if op.kind == "B") == first
    assert schedule.stats().peak_stash == tuple(min(m * v, first + p - 2 * device) for device in range(p))
    split = zero_bubble(p, m, chunks=v).stats().peak_stash
    assert split == tuple(min(m * v, first + p - device) for device in range(p))
    first = p - 2 + math.ceil(m / math.ceil(m / p))
    assert one_f_one_b(p, m).stats().peak_stash == tuple(min(m, first + p - 2 * device) for device in range(p))
    assert gpipe(p, m).stats().peak_stash == (m,) * p


@given(size=sizes())
@settings(max_examples=10, deadline=None)
def test_what_they_share(size):
    p, m, v = size
    plain, split = interleaved(p, m, chunks=v), zero_bubble(p, m, chunks=v)
    assert plain.ops == tuple(op for op in split.ops if op.kind != "W")
    assert one_f_one_b(p, m).ops == interleaved(p, m, chunks=1).ops
    # In the same tick on every device, without a gap: a slot of W that no device waits in.
    ticks = [sorted(op.tick for op in split.ops if op.kind == "W" and op.device == device) for device in range(p)]
    assert all(one == list(range(ticks[0][0], ticks[0][0] + m * v)) for one in ticks)


@given(st.integers(1, 8), st.integers(1, 20))
@settings(max_examples=12, deadline=None)
def test_gpipe_takes_any_number_of_micro_batches_and_mixes_no_kinds(p, m):
    schedule = gpipe(p, m)
    assert runs(schedule.ops, p, m, 1)
    ticks = {kind: {op.tick for op in schedule.ops if op.kind == kind} for kind in "FB"}
    assert not ticks["F"] & ticks["B"] and len(head_runs(schedule)) == math.ceil(m / p)


def test_a_table_in_full():
    schedule = one_f_one_b(2, 3)
    forwards = [Op(device + i, device, "F", 0, i) for i in range(3) for device in range(2)]
    backwards = [Op(3 - device + i, device, "B", 0, i) for i in range(3) for device in range(2)]
    assert set(schedule.ops) == {*forwards, *backwards}
    assert [schedule.stage(op) for op in interleaved(2, 2).ops if op.kind == "F"] == [0, 0, 1, 2, 1, 2, 3, 3]
    assert repr(schedule) == "Schedule(name='one_f_one_b', stages=2, microbatches=3, chunks=1)"


@pytest.mark.parametrize("make_one", [one_f_one_b, interleaved, zero_bubble])
def test_fewer_micro_batches_than_stages_are_refused(make_one):
    with pytest.raises(ValueError, match=r"3 micro-batches over 4 stages .* at least 4 .* at most 3 stages, or gpipe"):
        make_one(4, 3)


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        ((0, 4), ValueError, "stages must be at least 1, got 0"),
        ((4, -1), ValueError, "microbatches must be at least 1, got -1"),
        ((2.0, 4), TypeError, "stages must be a whole number, got 2.0"),
        ((True, 4), TypeError, "stages must be a whole number, got True"),
    ],
)
def test_sizes_that_are_none_are_refused(size, error, text):
    for make_one in (gpipe, one_f_one_b, interleaved, zero_bubble):
        with pytest.raises(error, match=text):
            make_one(*size)
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        interleaved(2, 2, chunks=0)


def test_schedules_by_name():
    assert named("1f1b", 2, 4) == named("one_f_one_b", 2, 4, chunks=1) == one_f_one_b(2, 4)
    assert named("zero-bubble", 2, 4) == zero_bubble(2, 4, chunks=2) and named("gpipe", 2, 1) == gpipe(2, 1)
    assert named("interleaved", 2, 4, chunks=3) == interleaved(2, 4, chunks=3)
    assert isinstance(named("gpipe", 1, 1), Schedule)
    with pytest.raises(ValueError, match="no schedule 'pipe'; use one of gpipe, one_f_one_b, interleaved, zero_bubble"):
        named("pipe", 2, 2)
    with pytest.raises(ValueError, match="gpipe has 1 chunk per device, got 2; leave chunks out"):
        named("gpipe", 2, 2, chunks=2)
