"""The memory of a step by role, one bar for each strategy, beside what the chip has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from jaxshard.core.layout import Layout
from jaxshard.core.mesh import mesh_str
from jaxshard.core.pictures.canvas import drawing
from jaxshard.core.pictures.style import ROLES, WIDTH, ink_on
from jaxshard.core.types import Role
from jaxshard.plan.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEEN = 0.001
"""The share of the picture's width from which on a bar is seen, and its role named."""

_SMALL = 0.05
"""The share of a limit below which the longest bar would be too short to be read beside its line."""

_WRITTEN = 0.07
"""The share of the picture's width from which on a bar has its number in it."""

_AT_REST: dict[Role, str] = {
    "param": "parameters", "grad": "gradients", "opt": "optimizer state", "state": "model state"
}  # fmt: skip


class _Bar(NamedTuple):
    """What is drawn of a prediction or a layout.

    Attributes:
      by_role: bytes by role.
      verdict: what stands behind the total.
      limit: bytes that a program may use, if they are known.
      devices: they, in words.
    """

    by_role: Mapping[str, int]
    verdict: str
    limit: int | None
    devices: str

    @property
    def total(self) -> int:
        """Bytes of all roles together."""
        return sum(self.by_role.values())


def memory_figure(predictions: Mapping[str, Prediction | Layout], *, title: str = "") -> Figure:
    """Draw the memory of a device by role, stacked: the peak of each prediction, or what rests in each layout.

    Beside the peaks of predictions stands the line of the memory that a program may use; where every peak is a small
    share of it, it stands in words above the picture, whose scale is that of the bars.

    Args:
      predictions: by the names beside the bars, such as those of strategies; drawn from top to bottom. Of layouts,
        which know no activations, the stored arrays are drawn.
      title: above the picture; by default the devices of the first one.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no predictions.

    Example:
      memory_figure({"fsdp": js.plan.predict(layout, loss_fn, batch, tx=tx)}).savefig("memory.svg")
    """
    if not predictions:
        raise ValueError("memory_figure: give at least one prediction or layout")
    bars = {name: _bar(one) for name, one in predictions.items()}
    limits = sorted({bar.limit for bar in bars.values() if bar.limit})
    longest = max(bar.total for bar in bars.values())
    lines = [limit for limit in limits if longest >= _SMALL * limit]
    widest = max(longest, *lines, 1)
    unit, size = next((name, size) for name, size in _UNITS if widest >= size)
    roles = [role for role in ROLES if any(bar.by_role.get(role, 0) > _SEEN * widest for bar in bars.values())]
    at_rest = any(isinstance(one, Layout) for one in predictions.values())
    with drawing(WIDTH, 2.5 + 0.52 * len(bars)) as (figure, look):
        axes = figure.subplots()
        axes.grid(axis="x")
        for row, bar in enumerate(bars.values()):
            left = 0.0
            for role in roles:
                width, colour = bar.by_role.get(role, 0), ROLES[role]
                axes.barh(row, width / size, left=left / size, height=0.74, color=colour, edgecolor=look.paper)
                if width > _WRITTEN * widest:
                    box = {"facecolor": colour, "edgecolor": "none", "pad": 1}
                    axes.text(
                        (left + width / 2) / size, row, f"{width / size:.3g}", ha="center", va="center_baseline",
                        color=ink_on(colour), bbox=box, zorder=4,
                    )  # fmt: skip
                left += width
            box = {"facecolor": look.paper, "edgecolor": "none", "pad": 1.5}
            words = f"{bar.total / size:.3g} {unit}{bar.verdict}"
            place = ((left + 0.012 * widest) / size, row)
            axes.text(*place, words, va="center_baseline", fontweight="bold", bbox=box, zorder=5)
        beyond = [limit for limit in limits if limit not in lines]
        if beyond:
            words = ", ".join(_human(limit) for limit in beyond)
            axes.set_title(f"usable: {words}, far to the right of this scale", loc="right")
        for limit in lines:
            axes.axvline(limit / size, color=look.ink, linestyle="--", linewidth=1.8)
            axes.annotate(
                f"usable: {_human(limit)}", (limit / size, 1), xycoords=("data", "axes fraction"),
                xytext=(-4, 4), textcoords="offset points", ha="right",
            )  # fmt: skip
        axes.set_xlim(0, widest * (1.22 if at_rest else 1.4) / size)
        axes.set_yticks(range(len(bars)), list(bars))
        axes.tick_params(left=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} on each device {'between steps' if at_rest else 'at the fullest moment'}")
        figure.suptitle(title or next(iter(bars.values())).devices, x=0.01, ha="left")
        figure.legend(handles=[_patch(role) for role in roles], loc="outside lower left", ncols=3)
    return figure


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))


def _human(size: int) -> str:
    unit, scale = next((name, scale) for name, scale in _UNITS if size >= scale)
    return f"{size / scale:.4g} {unit}"


def _bar(one: Prediction | Layout) -> _Bar:
    if isinstance(one, Layout):
        by_role = {_AT_REST[role]: size for role, size in one.bytes_per_device().items()}
        return _Bar(by_role, "", None, f"{one.mesh.size} devices ({mesh_str(one.mesh)})")
    verdict = {True: ", fits", False: ", does not fit", None: ", may fit"}[one.fits]
    axes = ", ".join(f"{axis}={size}" for axis, size in one.mesh.items())
    devices = f"{one.devices}{f' {one.chip.name}' if one.chip is not None else ' devices'} ({axes})"
    return _Bar(one.by_role, "" if one.usable_bytes is None else verdict, one.usable_bytes, devices)


def _patch(role: str) -> object:
    from matplotlib.patches import Patch

    return Patch(facecolor=ROLES[role], label=role)
