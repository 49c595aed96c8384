"""Schedules as text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.schedules import interleaved, one_f_one_b, zero_bubble
from tests.schedules.tables import schedules


def test_a_chart_in_full():
    assert str(one_f_one_b(2, 3)).splitlines() == [
        "one_f_one_b: 2 stages, 3 micro-batches; a cell is micro-batch",
        "tick       0 1 2 3 4 5",
        "device 0 F 0 1 2",
        "         B       0 1 2",
        "device 1 F   0 1 2",
        "         B     0 1 2",
    ]
    assert str(zero_bubble(1, 1)).splitlines() == [
        "zero_bubble: 1 stage of 2 chunks each, 1 micro-batch; a cell is chunk.micro-batch",
        "tick         0   1   2",
        "device 0 F 0.0 1.0",
        "         B     1.0 0.0",
        "         W     1.0 0.0",
    ]


def test_what_does_not_fit_is_counted():
    lines = interleaved(4, 64).chart(width=60).splitlines()
    assert len(lines) == 2 + 4 * 2 + 1 and lines[-1] == "... and 131 more ticks"
    assert lines[1].split() == ["tick", *map(str, range(10))] and interleaved(4, 64).ticks == 141


@given(schedule=schedules(p=4, m=12), width=st.integers(30, 200))
@settings(max_examples=16, deadline=None)
def test_every_operation_that_fits_stands_under_its_tick(schedule, width):
    lines = schedule.chart(width=width).splitlines()
    ticks = lines[1].split()[1:]
    assert all(len(line) <= width for line in lines[1:])
    kinds = "FBW" if schedule.splits_backward else "FB"
    shown = 0
    for op in schedule.ops:
        if op.tick >= len(ticks):
            continue
        row = lines[2 + op.device * len(kinds) + kinds.index(op.kind)]
        end = lines[1].index(f" {op.tick}", 10) + len(f" {op.tick}") if op.tick else lines[1].index("0") + 1
        text = str(op.microbatch) if schedule.chunks == 1 else f"{op.chunk}.{op.microbatch}"
        assert row[:end].split()[-1] == text
        shown += 1
    note = lines[-1].split()
    assert sum(len(line.split()) for line in lines[2 : 2 + len(kinds) * schedule.stages]) == shown + (
        schedule.stages * (2 + len(kinds))
    )
    assert (int(note[2]) if note[0] == "..." else 0) == schedule.ticks - len(ticks)
