"""What a notebook shows of a schedule."""

import pytest

from jaxshard.schedules import gpipe, interleaved, zero_bubble
from jaxshard.schedules.page import _MOST
from tests.notebook_page import read


def test_a_bar_for_every_operation_and_the_figures():
    schedule = zero_bubble(2, 3, chunks=1)
    page = read(schedule)
    assert page.text[:2] == ["zero_bubble", "2 devices, 3 micro-batches"]
    words = {"F": "forward", "B": "backward", "W": "weights' gradients"}
    assert len(page.titles) == 18 and sorted(page.titles) == sorted(
        f"{words[op.kind]} of micro-batch {op.microbatch}, chunk {op.chunk}, tick {op.tick}" for op in schedule.ops
    )
    stats = schedule.stats()
    assert dict(page.tables[0]) == {
        "ticks": str(stats.ticks),
        "bubble in lockstep": f"{stats.bubble:.1%}",
        "bubble asynchronously": f"{stats.bubble_async:.1%}",
        "kept at most, by device": ", ".join(map(str, stats.peak_stash)),
        "head runs": str(stats.head_runs),
    }


@pytest.mark.parametrize("schedule", [gpipe(1, 1), interleaved(4, 8)], ids=["one device", "chunks"])
def test_sizes_are_told(schedule):
    chunks = ", 2 chunks each" if schedule.chunks == 2 else ""
    assert f"{schedule.stages} devices{chunks}, {schedule.microbatches} micro-batches" in read(schedule).text


def test_of_long_schedules_the_first_ticks_are_drawn():
    schedule = interleaved(8, 128)
    page = read(schedule)
    assert _MOST <= len(page.titles) < _MOST + 16 < len(schedule.ops)
    last = max(int(title.rpartition(" ")[2]) for title in page.titles)
    assert f"... and {schedule.ticks - 1 - last} more ticks" in page.text
    assert len(page.titles) == sum(op.tick <= last for op in schedule.ops)
