"""When embedding and head run: every micro-batch once, at most one per device, never after it is needed."""

import math

from hypothesis import given, settings

from jaxshard.schedules import Run, Schedule, embed_grad_runs, embed_runs, gpipe, head_runs, interleaved, one_f_one_b
from tests.schedules.tables import schedules


def ticks(schedule, kind, stage):
    return {op.microbatch: op.tick for op in schedule.ops if op.kind == kind and schedule.stage(op) == stage}


def check(schedule):
    last = schedule.stages * schedule.chunks - 1
    first_f, first_b = ticks(schedule, "F", 0), ticks(schedule, "B", 0)
    last_f, last_b = ticks(schedule, "F", last), ticks(schedule, "B", last)
    everything = list(range(schedule.microbatches))
    for runs in (head_runs(schedule), embed_runs(schedule), embed_grad_runs(schedule)):
        assert sorted(i for run in runs for i in run.microbatches) == everything
        assert all(1 <= len(run.microbatches) <= schedule.stages for run in runs)
        assert len({run.tick for run in runs}) == len(runs) and runs == sorted(runs)
    for run in head_runs(schedule):
        assert run.tick == max(last_f[i] for i in run.microbatches) <= min(last_b[i] for i in run.microbatches)
    assert all(run.tick == min(first_f[i] for i in run.microbatches) for run in embed_runs(schedule))
    assert all(run.tick == max(first_b[i] for i in run.microbatches) for run in embed_grad_runs(schedule))
    fewest = math.ceil(schedule.microbatches / schedule.stages)
    assert len(embed_runs(schedule)) == len(embed_grad_runs(schedule)) == fewest <= len(head_runs(schedule))


@given(schedule=schedules())
@settings(max_examples=16, deadline=None)
def test_runs_of_the_named_schedules(schedule):
    check(schedule)
    p, m = schedule.stages, schedule.microbatches
    if m % p == 0 or schedule.chunks == 1:
        assert len(head_runs(schedule)) == math.ceil(m / p)
    else:
        # Each group of more than p needs two.
        assert len(head_runs(schedule)) == m // p + min(m // p, m % p)


def test_runs_in_full():
    schedule = interleaved(2, 5)
    assert head_runs(schedule) == [Run(5, (0, 1)), Run(6, (2,)), Run(10, (3, 4))]
    assert embed_runs(schedule) == [Run(0, (0, 1)), Run(2, (2, 6 - 3)), Run(7, (4,))]
    assert embed_grad_runs(schedule) == [Run(10, (0, 1)), Run(14, (2, 3)), Run(15, (4,))]
    assert head_runs(gpipe(2, 3)) == [Run(2, (0, 1)), Run(3, (2,))]
    alternating = [(t, d, k, 0, i) for i in range(2) for t, d, k in [(2 * i, 0, "F"), (2 * i, 0, "B")]]
    alternating = [(tick // 2, *rest) for tick, *rest in alternating]
    assert head_runs(Schedule("mine", 1, 2, 1, tuple(alternating))) == [Run(0, (0,)), Run(1, (1,))]


def test_a_run_ends_where_a_member_is_needed():
    """Plain 1F1B of two devices: the last stage's backward stands in the tick of its forward, so nothing is shared."""
    schedule = one_f_one_b(2, 4)
    ops = [op._replace(tick=op.tick - 1) if op.kind == "B" else op for op in schedule.ops]
    assert [run.microbatches for run in head_runs(schedule)] == [(0, 1), (2, 3)]
    early = Schedule("early", 2, 4, 1, tuple(ops))
    assert head_runs(early) == [Run(i + 1, (i,)) for i in range(4)]
