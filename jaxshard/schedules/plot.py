"""Pictures of schedules: a bar per operation over time. They need matplotlib (extra viz)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.stats import Costs, Span, asynchronous_spans, lockstep_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_COLOURS = {"F": "#56B4E9", "B": "#E69F00", "W": "#009E73"}
"""Of Okabe and Ito, which colour-blind people tell apart."""
_NAMES = {"F": "forward", "B": "backward", "W": "weights' gradients"}
_LABELLED = 600
"""The largest number of operations for which micro-batches are written into the bars."""


def plot_schedule(schedule: Schedule, path: str | os.PathLike[str], *, costs: Costs = Costs()) -> None:  # noqa: B008
    """Write a picture of a schedule: what each device does when, in lockstep and asynchronously.

    Args:
      schedule: the schedule.
      path: the file; its suffix says its kind: .png, .svg, .pdf.
      costs: how long operations take. Chunks have shades of their own, the first one the lightest.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: matplotlib can't write that kind of file.
    """
    schedule_figure(schedule, costs=costs).savefig(path)


def schedule_figure(schedule: Schedule, *, costs: Costs = Costs()) -> Figure:  # noqa: B008 - frozen
    """Return the picture that `plot_schedule` writes, as a figure of matplotlib that no window holds.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    stats = schedule.stats(costs)
    figure = Figure(figsize=(14, 1.6 + 0.7 * schedule.stages), layout="constrained")
    panels: Any = figure.subplots(2, 1, sharex=True)
    _draw(panels[0], schedule, lockstep_spans(schedule, costs), f"in lockstep: bubble {stats.bubble:.1%}")
    _draw(panels[1], schedule, asynchronous_spans(schedule, costs), f"asynchronously: bubble {stats.bubble_async:.1%}")
    panels[1].set_xlabel("time")
    figure.suptitle(f"{schedule.name}; micro-batches: {schedule.microbatches}, chunks per device: {schedule.chunks}")
    figure.legend(handles=_legend(schedule), loc="outside right upper")
    return figure


def _legend(schedule: Schedule) -> list[Patch]:
    """The colours of the operations, and the shades of the chunks where there are several."""
    from matplotlib.patches import Patch

    kinds = {op.kind for op in schedule.ops}
    patches = [Patch(facecolor=colour, label=_NAMES[kind]) for kind, colour in _COLOURS.items() if kind in kinds]
    chunks = schedule.chunks
    shades = [Patch(facecolor="black", alpha=_shade(chunk, chunks), label=f"chunk {chunk}") for chunk in range(chunks)]
    return patches + (shades if chunks > 1 else [])


def _shade(chunk: int, chunks: int) -> float:
    """How opaque a chunk's bars are; the last ones fully."""
    return (chunk + 1) / chunks * 0.6 + 0.4


def _draw(axes: Axes, schedule: Schedule, spans: Sequence[Span], title: str) -> None:
    bars: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for op, start, end in spans:
        bars.setdefault((op.kind, op.chunk, op.device), []).append((start, end - start))
    for (kind, chunk, device), places in bars.items():
        axes.broken_barh(
            places,
            (device - 0.4, 0.8),
            facecolors=_COLOURS[kind],
            alpha=_shade(chunk, schedule.chunks),
            edgecolor="white",
            linewidth=0.3,
        )
    if len(spans) <= _LABELLED:
        for op, start, end in spans:
            axes.text((start + end) / 2, op.device, str(op.microbatch), ha="center", va="center", fontsize=9)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_yticks(range(schedule.stages), [f"device {device}" for device in range(schedule.stages)])
    axes.invert_yaxis()
