"""Plot schedules by matplotlib (extra viz): a bar per operation over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxshard.core.pictures.canvas import drawing, write_picture
from jaxshard.core.pictures.style import GREY, OPERATIONS, SIZE, WIDTH, Look, ink_on, tint
from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.stats import Costs, Span, asynchronous_spans, lockstep_spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

NAMES = {"F": "forward", "B": "backward", "W": "weights' gradients"}
"""The operations in words."""

_SMALL = SIZE - 2
"""The font size, in points, of the micro-batch index in a bar."""


def plot_schedule(schedule: Schedule, path: str | os.PathLike[str], *, costs: Costs = Costs()) -> None:  # noqa: B008
    """Write a picture of a schedule: the operations of each device over time, in lockstep and asynchronously.

    Chunks have different shades, the first the lightest.

    Args:
      schedule: the schedule.
      path: the file, with the suffix .png, .svg or .pdf.
      costs: the time of each kind of operation.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: another suffix.

    Example:
        js.schedules.plot_schedule(js.schedules.interleaved(4, 8), "schedule.svg")
    """
    write_picture(schedule_figure(schedule, costs=costs), path)


def schedule_figure(schedule: Schedule, *, costs: Costs = Costs()) -> Figure:  # noqa: B008 - frozen
    """Return the picture of `plot_schedule` as a matplotlib figure, which is not shown in a window.

    Raises:
      ImportError: matplotlib is not installed.

    Example:
      js.schedules.schedule_figure(js.schedules.zero_bubble(4, 8, chunks=1)).savefig("schedule.svg")
    """
    stats = schedule.stats(costs)
    with drawing(WIDTH, 2.3 + 0.6 * schedule.stages) as (figure, look):
        panels: Any = figure.subplots(2, 1, sharex=True)
        lockstep, alone = lockstep_spans(schedule, costs), asynchronous_spans(schedule, costs)
        end = max(span.end for span in (*lockstep, *alone))
        _draw(panels[0], schedule, lockstep, end, look)
        _draw(panels[1], schedule, alone, end, look)
        panels[0].set_title(f"in lockstep: bubble {stats.bubble:.1%}")
        panels[1].set_title(f"asynchronously: bubble {stats.bubble_async:.1%}")
        panels[0].tick_params(bottom=False)
        panels[1].set_xlabel("time")
        each = "" if schedule.chunks == 1 else f", {schedule.chunks} chunks each"
        sizes = f"{schedule.stages} devices{each}, {schedule.microbatches} micro-batches"
        figure.suptitle(f"{schedule.name}: {sizes}", x=0.01, ha="left")
        figure.legend(handles=_legend(schedule), loc="outside lower left", ncols=5)
    return figure


def _legend(schedule: Schedule) -> list[Patch]:
    """Make the legend: the colours of the operations, and the shades of the chunks if there are several."""
    from matplotlib.patches import Patch

    kinds = {op.kind for op in schedule.ops}
    patches = [Patch(facecolor=colour, label=NAMES[kind]) for kind, colour in OPERATIONS.items() if kind in kinds]
    chunks = schedule.chunks
    shades = [Patch(facecolor=tint(GREY, chunk, chunks), label=f"chunk {chunk}") for chunk in range(chunks)]
    return patches + (shades if chunks > 1 else [])


def _draw(axes: Any, schedule: Schedule, spans: Sequence[Span], end: float, look: Look) -> None:
    bars: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for op, start, stop in spans:
        bars.setdefault((op.kind, op.chunk, op.device), []).append((start, stop - start))
    for (kind, chunk, device), places in bars.items():
        colour = tint(OPERATIONS[kind], chunk, schedule.chunks)
        axes.broken_barh(places, (device - 0.42, 0.84), facecolors=colour, edgecolor=look.paper, linewidth=0.6)
    points = 0.88 * WIDTH * 72 / end
    for op, start, stop in spans:
        if (stop - start) * points > 0.62 * _SMALL * len(str(op.microbatch)) + 2:
            ink = ink_on(tint(OPERATIONS[op.kind], op.chunk, schedule.chunks))
            middle = (start + stop) / 2
            axes.text(
                middle, op.device, str(op.microbatch), ha="center", va="center_baseline", fontsize=_SMALL, color=ink
            )
    axes.set_xlim(0, end)
    axes.set_yticks(range(schedule.stages), [f"device {device}" for device in range(schedule.stages)])
    axes.tick_params(left=False)
    axes.invert_yaxis()
