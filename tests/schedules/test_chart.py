"""Schedules as text."""

from jaxshard.schedules import interleaved, one_f_one_b, zero_bubble


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
