"""Draw a schedule for notebooks: its statistics, and a bar for every operation."""

from __future__ import annotations

from jaxshard.core.pictures import page
from jaxshard.core.pictures.boxes import Box, beside, drawing, row
from jaxshard.core.pictures.style import OPERATIONS, tint
from jaxshard.core.text_table import Table
from jaxshard.schedules.stats import Costs, Span, compute_stats, lockstep_spans
from jaxshard.schedules.table import KINDS
from jaxshard.schedules.table import Table as Schedule

NAMES = {"F": "forward", "B": "backward", "W": "weights' gradients"}
"""The names of the kinds of operations."""

_MOST = 1500
"""The most operations that are drawn."""

_WIDTH, _ROW, _LEFT = 794, 20, 66
_IDLE = "rgba(102,102,102,0.15)"


def schedule_page(schedule: Schedule) -> str:
    """Write the HTML of a schedule, with a backward that takes twice as long as a forward.

    Chunks have different shades, the first the lightest. Only the first ticks of long schedules are drawn.
    """
    costs = Costs()
    stats = compute_stats(schedule, costs)
    spans = lockstep_spans(schedule, costs)
    last = spans[min(len(spans), _MOST) - 1].op.tick
    shown = [span for span in spans if span.op.tick <= last]
    more = f"... and {schedule.ticks - 1 - last} more ticks" if len(shown) < len(spans) else ""
    held = ", ".join(map(str, stats.peak_stash))
    figures = [
        ("ticks", f"{stats.ticks:,}"),
        ("bubble in lockstep", f"{stats.bubble:.1%}"),
        ("bubble asynchronously", f"{stats.bubble_async:.1%}"),
        ("kept at most, by device", held),
        ("head runs", f"{stats.head_runs:,}"),
    ]
    kinds = [kind for kind in KINDS if any(op.kind == kind for op in schedule.ops)]
    each = "" if schedule.chunks == 1 else f", {schedule.chunks} chunks each"
    sizes = f"{schedule.stages} devices{each}, {schedule.microbatches} micro-batches"
    return page.page(
        page.title(schedule.name),
        page.paragraph(sizes),
        _draw(schedule, shown),
        page.paragraph(more) if more else "",
        page.legend({NAMES[kind]: OPERATIONS[kind] for kind in kinds}),
        page.table(Table(figures, "<>")),
    )


def _draw(schedule: Schedule, spans: list[Span]) -> str:
    """Draw a row for each device over time, with the micro-batch in each bar that has space for it."""
    per_unit = _WIDTH / max(span.end for span in spans)
    rows: list[list[Box]] = [[] for _ in range(schedule.stages)]
    for op, start, stop in sorted(spans, key=lambda span: span.start):
        left, width = start * per_unit, (stop - start) * per_unit
        where = f"{NAMES[op.kind]} of micro-batch {op.microbatch}, chunk {op.chunk}, tick {op.tick}"
        words = str(op.microbatch) if width > 7 * len(str(op.microbatch)) + 3 else ""
        colour = tint(OPERATIONS[op.kind], op.chunk, schedule.chunks)
        rows[op.device].append(Box(left, left + max(width - 1, 0.5), colour, words, where))
    drawn = [row(boxes, width=_WIDTH, height=_ROW, font=11, behind=_IDLE) for boxes in rows]
    return drawing(*(beside(f"device {device}", one, width=_LEFT, font=12) for device, one in enumerate(drawn)))
