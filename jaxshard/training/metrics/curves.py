"""Draw losses and throughput of training runs over time, with matplotlib (the optional dependency `viz`)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshard.core.pictures.canvas import drawing
from jaxshard.core.pictures.style import WIDTH, Look
from jaxshard.training.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[Record] | Sequence[float]
"""The records of a training run, or the losses of its steps, starting at step 1."""

_COLUMNS = 4
"""The largest number of names in a row of the legend."""

_DASH = 6.0
"""The length in points of a dash, for curves that overlap."""


def loss_figure(runs: Mapping[str, Curve], *, reference: str | None = None, title: str = "") -> Figure:
    """Draw the loss of each training run, and the difference of each from a reference run.

    Args:
      runs: {name in the legend: the records that `js.fit` passed to its callbacks, or the losses of the steps}. Losses
        of evaluations in the records are drawn as dots.
      reference: the name of one of the runs, such as a run on one device. A second panel then shows, at each step, the
        largest relative difference so far of each other run's loss from the reference's, and curves that overlap are
        drawn with alternating dashes.
      title: the title above the figure.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no runs, a run has no losses, or no run is called `reference`.

    Example:
        history = []
        js.fit(run, step, batches, steps=100, callbacks=[history.append])
        js.metrics.loss_figure({"fsdp": history})
    """
    losses = {name: _losses(name, run) for name, run in runs.items()}
    if not losses:
        raise ValueError("loss_figure: give at least one run")
    if reference is not None and reference not in losses:
        raise ValueError(f"loss_figure: no run is called {reference!r}; there are {', '.join(map(repr, losses))}")
    rows = -(-len(losses) // _COLUMNS)
    with drawing(WIDTH, (4.2 if reference is None else 6.8) + 0.3 * rows) as (figure, look):
        heights = [1.0] if reference is None else [1.7, 1.0]
        panels: Any = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)
        axes = panels[0, 0]
        axes.grid(axis="y")
        for number, (name, points) in enumerate(losses.items()):
            colour = look.lines[number % len(look.lines)]
            style = _dashes(number, len(losses)) if reference else _STYLES[number % len(_STYLES)]
            axes.plot(*zip(*points.items(), strict=True), linestyle=style, color=colour, label=name)
            held_out = _evaluations(runs[name])
            if held_out:
                axes.scatter(*zip(*held_out.items(), strict=True), color=colour, edgecolor=look.ink, zorder=4)
        axes.set_ylabel("loss")
        if reference is not None:
            _draw_distances(panels[1, 0], losses, reference, look)
        panels[-1, 0].set_xlabel("step")
        if title:
            figure.suptitle(title, x=0.01, ha="left")
        legend = figure.legend(loc="outside lower left", ncols=min(_COLUMNS, len(losses)))
        for line in legend.get_lines() if reference else ():
            line.set_linestyle("-")
    return figure


def throughput_figure(runs: Mapping[str, Sequence[Record]], *, title: str = "") -> Figure:
    """Draw the tokens or rows per second of each training run over wall time, and their median.

    Args:
      runs: {name in the legend: the records that `js.fit` passed to its callbacks}.
      title: the title above the figure.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no runs, a run has no records, or some runs count tokens and others rows.

    Example:
        history = []
        js.fit(run, step, batches, steps=100, tokens=64 * 32, callbacks=[history.append])
        js.metrics.throughput_figure({"fsdp": history})
    """
    if not runs or not all(runs.values()):
        empty = ", ".join(name for name, records in runs.items() if not records)
        raise ValueError(f"throughput_figure: {f'{empty}: no records' if empty else 'give at least one run'}")
    units = {name: next(iter(records[0].speed)) for name, records in runs.items()}
    unit = next(iter(units.values()))
    if set(units.values()) != {unit}:
        said = ", ".join(f"{name} {found.removesuffix('_per_second')}" for name, found in units.items())
        raise ValueError(f"throughput_figure: runs count different things: {said}; give `tokens` to every fit, or none")
    with drawing(WIDTH, 4.2 + 0.3 * -(-len(runs) // 2)) as (figure, look):
        axes: Any = figure.subplots()
        axes.grid(axis="y")
        for number, (name, records) in enumerate(runs.items()):
            seconds = list(itertools.accumulate(record.seconds for record in records))
            speeds = [record.speed[unit] for record in records]
            colour, style = look.lines[number % len(look.lines)], _STYLES[number % len(_STYLES)]
            median = statistics.median(speeds)
            label = f"{name}: {format(median, ',.0f' if median >= 100 else '.3g')} in the median"
            axes.plot(seconds, speeds, linestyle=style, color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("seconds of steps")
        axes.set_ylabel(unit.replace("_", " "))
        if title:
            figure.suptitle(title, x=0.01, ha="left")
        figure.legend(loc="outside lower left", ncols=2)
    return figure


_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
"""Line styles by which runs can be told apart without colours."""


def _dashes(number: int, count: int) -> Any:
    """Return the dash pattern of curve number `number` of `count`, with gaps through which overlapping curves show."""
    return "-" if count == 1 else (number * _DASH, (_DASH, (count - 1) * _DASH))


def _draw_distances(axes: Any, losses: Mapping[str, Mapping[int, float]], reference: str, look: Look) -> None:
    """Draw each run's largest relative difference so far from the reference, on a logarithmic scale without zeros."""
    expected = losses[reference]
    axes.grid(axis="y")
    axes.set_yscale("log")
    for number, (name, points) in enumerate(losses.items()):
        apart = [abs(loss / expected[step] - 1) for step, loss in points.items() if expected.get(step)]
        largest = zip(filter(expected.get, points), itertools.accumulate(apart, max), strict=True)
        shown = [(step, distance) for step, distance in largest if distance > 0]
        if name != reference and shown:
            style, colour = _STYLES[number % len(_STYLES)], look.lines[number % len(look.lines)]
            axes.plot(*zip(*shown, strict=True), color=colour, linestyle=style)
    axes.set_ylabel(f"relative difference\nfrom {reference},\nlargest so far")


def _losses(name: str, run: Curve) -> dict[int, float]:
    """Return {step: loss} of a training run; raise ValueError if it has no losses."""
    records = {one.step: one.metrics["loss"] for one in run if isinstance(one, Record)}
    numbers: Sequence[Any] = run
    points = records or {step: float(loss) for step, loss in enumerate(numbers, 1)}
    if not points:
        raise ValueError(f"loss_figure: the run {name!r} has no losses")
    return points


def _evaluations(run: Curve) -> dict[int, float]:
    """Return {step: loss} of the evaluations in a run's records."""
    records = (one for one in run if isinstance(one, Record))
    return {one.step: one.evaluation["loss"] for one in records if one.evaluation and "loss" in one.evaluation}
