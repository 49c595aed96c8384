"""Idle time and stashes: worked by hand on small tables, and by a simulation that shares nothing with the package."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.schedules import Costs, Schedule, interleaved, zero_bubble
from tests.notebook_page import check_shows_text
from tests.schedules.tables import schedules

# Plain 1F1B of two stages, one operation per device and tick.
PLAIN = [
    *[(0, 0, "F", 0, 0), (1, 0, "F", 0, 1), (3, 0, "B", 0, 0), (4, 0, "F", 0, 2), (5, 0, "B", 0, 1), (7, 0, "B", 0, 2)],
    *[(1, 1, "F", 0, 0), (2, 1, "B", 0, 0), (3, 1, "F", 0, 1), (4, 1, "B", 0, 1), (5, 1, "F", 0, 2), (6, 1, "B", 0, 2)],
]


def test_plain_1f1b_idles_more_in_lockstep_than_asynchronously():
    """Ticks 0, 1: F; 2: B; 3, 4, 5: both; 6, 7: B. In lockstep 2 F, 3 B and 3 of both: 17. Alone: 12 = 1 + 9 + 2."""
    stats = Schedule("plain", 2, 3, 1, tuple(PLAIN)).stats()
    assert stats.ticks == 8 and stats.peak_stash == (2, 1) and stats.head_runs == 3
    assert stats.bubble == pytest.approx(1 - 9 / 17) and stats.bubble_async == pytest.approx(1 - 9 / 12)


def simulated(schedule, costs, parts):
    """The time at which all devices are done, stepping through time in units of 1 / parts."""
    cost = {kind: round(costs[kind] * parts / schedule.chunks) for kind in "FBW"}
    queues = [[op for op in schedule.ops if op.device == device] for device in range(schedule.stages)]
    ready, busy, now = {}, [0] * schedule.stages, 0
    last = schedule.stages * schedule.chunks - 1
    while any(queues):
        for device, queue in enumerate(queues):
            if queue and busy[device] <= now:
                op = queue[0]
                k, i = schedule.stage(op), op.microbatch
                needs = {"F": ("F", k - 1, i), "B": ("B", k + 1, i), "W": ("B", k, i)}[op.kind]
                free = (op.kind == "F" and k == 0) or (op.kind == "B" and k == last)
                if free or ready.get(needs, now + 1) <= now:
                    ready[op.kind, k, i] = busy[device] = now + cost[op.kind]
                    queue.pop(0)
        now += 1
    return max(busy) / parts


@given(schedule=schedules(p=4, v=2, m=6), forward=st.integers(1, 3), backward=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_the_asynchronous_bubble_is_that_of_a_simulation(schedule, forward, backward):
    split = schedule.splits_backward
    costs = {"F": forward, "B": backward if split else 2 * backward, "W": backward}
    end = simulated(schedule, costs, schedule.chunks)
    useful = schedule.microbatches * (forward + 2 * backward)
    assert schedule.stats(Costs(forward, 2 * backward)).bubble_async == pytest.approx(1 - useful / end, abs=1e-9)


@given(schedule=schedules(p=4, v=2, m=6))
@settings(max_examples=10, deadline=None)
def test_stash_counts_what_waits(schedule):
    end = "W" if schedule.splits_backward else "B"
    for device in range(schedule.stages):
        mine = [op for op in schedule.ops if op.device == device]
        born = {(op.chunk, op.microbatch): op.tick for op in mine if op.kind == "F"}
        freed = {(op.chunk, op.microbatch): op.tick for op in mine if op.kind == end}
        # Within a tick F comes first, so what is freed in a tick still counts there.
        waiting = [sum(born[x] <= tick <= freed[x] for x in born) for tick in born.values()]
        assert schedule.stats().peak_stash[device] == max(waiting)


def test_costs_are_of_a_whole_device():
    for v in (1, 2, 4):
        assert zero_bubble(4, 16, chunks=v).stats(Costs(2, 4)) == zero_bubble(4, 16, chunks=v).stats()
    cheap = zero_bubble(4, 8).stats(Costs(1, 2, W=0)).bubble
    assert cheap == pytest.approx(interleaved(4, 8).stats().bubble)
    assert interleaved(4, 8).stats(Costs(1, 2, W=0.3)) == interleaved(4, 8).stats()
    assert zero_bubble(4, 8).stats(Costs(1, 2, W=2)).bubble == pytest.approx(3 / 2 / (8 * 3 + 3 / 2))


@pytest.mark.parametrize("costs", [(0, 2), (1, -1), (1, 2, 3), (1, 2, -0.1), (float("nan"), 1), (1, float("inf"))])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="costs must be finite and above 0, W between 0 and B; got F="):
        Costs(*costs)


def test_a_notebook_shows_the_chart_and_the_figures():
    schedule = zero_bubble(2, 3, chunks=1)
    page = check_shows_text(schedule)
    assert page.text[0] == str(schedule)
    assert page.tables == [[list(fact) for fact in schedule.stats().facts.items()]]
    assert schedule.stats().facts["bubble"] == "0.1818 in lockstep, 0.1000 asynchronously"
