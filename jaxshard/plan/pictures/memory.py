"""Draw the memory of a step by role, one bar for each strategy, with the limit of the chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.pictures.canvas import drawing
from jaxshard.core.pictures.style import ROLES, WIDTH, ink_on
from jaxshard.core.types import Role
from jaxshard.plan.memory_report import MemoryReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEEN = 0.001
"""The smallest bar that is drawn and named, as a share of the picture's width."""

_SMALL = 0.05
"""A limit is drawn if the longest bar is at least this share of it; otherwise the bars would be too short."""

_WRITTEN = 0.07
"""The smallest bar that has its number in it, as a share of the picture's width."""

_STORED: dict[Role, str] = {
    "param": "parameters", "grad": "gradients", "opt": "optimizer state", "state": "model state"
}  # fmt: skip
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))


def memory_figure(predictions: Mapping[str, MemoryReport | Layout], *, title: str = "") -> Figure:
    """Draw the memory of a device by role, as stacked bars: the peak of each prediction, or the arrays of each layout.

    A line shows the memory that a program may use, unless all bars are short in comparison.

    Args:
      predictions: predictions of `js.plan.predict`, verdicts of `js.plan.compile_for` or layouts, by the names of their
        bars, drawn from top to bottom. The bar of a layout has its stored arrays, without activations.
      title: the title; by default the devices of the first prediction.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no predictions.

    Example:
      memory_figure({"fsdp": js.plan.predict(layout, loss_fn, batch, tx=tx)}).savefig("memory.svg")
    """
    if not predictions:
        raise ValueError("memory_figure: give at least one prediction or layout")
    bars = {name: _by_role(one) for name, one in predictions.items()}
    reports = [one for one in predictions.values() if isinstance(one, MemoryReport)]
    longest = max(sum(bar.values()) for bar in bars.values())
    limits = sorted({one.usable_bytes for one in reports if one.usable_bytes})
    lines = [limit for limit in limits if longest >= _SMALL * limit]
    widest = max(longest, *lines, 1)
    unit, scale = next((name, scale) for name, scale in _UNITS if widest >= scale)
    roles = [role for role in ROLES if any(bar.get(role, 0) > _SEEN * widest for bar in bars.values())]
    with drawing(WIDTH, 2.5 + 0.52 * len(bars)) as (figure, look):
        axes = figure.subplots()
        axes.grid(axis="x")
        handles = {}
        for row, (name, bar) in enumerate(bars.items()):
            left = 0.0
            for role in roles:
                width, colour = bar.get(role, 0) / scale, ROLES[role]
                drawn = axes.barh(row, width, left=left, height=0.74, color=colour, edgecolor=look.paper)
                handles[role] = drawn.patches[0]
                if width * scale > _WRITTEN * widest:
                    axes.bar_label(drawn, [f"{width:.3g}"], label_type="center", color=ink_on(colour))
                left += width
            words = f" {sum(bar.values()) / scale:.3g} {unit}{_verdict(predictions[name])}"
            axes.text(left, row, words, va="center_baseline", fontweight="bold")
        for limit in lines:
            axes.axvline(limit / scale, color=look.ink, linestyle="--", linewidth=1.8)
        if limits:
            beyond = "" if lines else ", far to the right of this scale"
            axes.set_title(f"usable: {', '.join(map(human_bytes, limits))}{beyond}", loc="right")
        axes.set_xlim(0, widest * (1.4 if reports else 1.22) / scale)
        axes.set_yticks(range(len(bars)), list(bars))
        axes.tick_params(left=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} on each device {'at the peak' if reports else 'between steps'}")
        figure.suptitle(title or _devices(next(iter(predictions.values()))), x=0.01, ha="left")
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=3)
    return figure


def _by_role(one: MemoryReport | Layout) -> dict[str, int]:
    if isinstance(one, MemoryReport):
        return one.by_role
    return {_STORED[role]: size for role, size in one.bytes_per_device().items()}


def _verdict(one: MemoryReport | Layout) -> str:
    if isinstance(one, Layout) or one.usable_bytes is None:
        return ""
    return {True: ", fits", False: ", does not fit", None: ", may fit"}[one.fits]


def _devices(one: MemoryReport | Layout) -> str:
    if isinstance(one, Layout):
        return f"{one.mesh.size} devices ({mesh_str(one.mesh)})"
    return one.where
