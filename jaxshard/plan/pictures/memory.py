"""The memory of a step by role, one bar for each strategy, beside what the chip has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxshard.core.pictures.canvas import drawing
from jaxshard.core.pictures.style import ROLES as COLOURS
from jaxshard.core.pictures.style import WIDTH, ink_on
from jaxshard.plan.prediction import ROLES, Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEEN = 0.001
"""The share of the picture's width from which on a bar is seen, and its role named."""

_WRITTEN = 0.07
"""The share of the picture's width from which on a bar has its number in it."""


def memory_figure(predictions: Mapping[str, Prediction], *, title: str = "") -> Figure:
    """Draw the peak of each prediction by role, stacked, and the line of the memory that a program may use.

    Args:
      predictions: by the names under the bars, such as those of strategies; drawn from top to bottom.
      title: above the picture; by default the devices of the first one.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there are no predictions.

    Example:
      memory_figure({"fsdp": js.plan.predict(layout, loss_fn, batch)}).savefig("memory.svg")
    """
    if not predictions:
        raise ValueError("memory_figure: give at least one prediction")
    first = next(iter(predictions.values()))
    limits = {one.usable_bytes for one in predictions.values() if one.usable_bytes}
    widest = max(*(one.peak.total for one in predictions.values()), *limits, 1) / 1e9
    sizes = {role: max(one.peak.by_role.get(role, 0) for one in predictions.values()) / 1e9 for role in ROLES}
    roles = [role for role, size in sizes.items() if size > _SEEN * widest]
    with drawing(WIDTH, 2.6 + 0.55 * len(predictions)) as (figure, look):
        axes = figure.subplots()
        axes.grid(axis="x")
        for row, prediction in enumerate(predictions.values()):
            left = 0.0
            for role in roles:
                size = prediction.peak.by_role.get(role, 0) / 1e9
                colour = COLOURS[role]
                axes.barh(row, size, left=left, height=0.74, color=colour, edgecolor=look.paper, linewidth=0.8)
                if size > _WRITTEN * widest:
                    ink = ink_on(colour)
                    axes.text(left + size / 2, row, f"{size:.3g}", ha="center", va="center_baseline", color=ink)
                left += size
            box = {"facecolor": look.paper, "edgecolor": "none", "pad": 1.5}
            words = _total(prediction)
            axes.text(left + 0.012 * widest, row, words, va="center_baseline", fontweight="bold", bbox=box, zorder=5)
        for limit in limits:
            axes.axvline(limit / 1e9, color=look.ink, linestyle="--", linewidth=1.8)
            axes.annotate(
                f"usable: {limit / 1e9:.4g} GB", (limit / 1e9, 1), xycoords=("data", "axes fraction"),
                xytext=(-4, 4), textcoords="offset points", ha="right",
            )  # fmt: skip
        axes.set_xlim(0, widest * 1.4)
        axes.set_yticks(range(len(predictions)), list(predictions))
        axes.tick_params(left=False)
        axes.invert_yaxis()
        axes.set_xlabel("GB on each device at the fullest moment")
        mesh = ", ".join(f"{axis}={size}" for axis, size in first.mesh.items())
        chip = f" {first.chip.name}" if first.chip is not None else " devices"
        figure.suptitle(title or f"{first.devices}{chip} ({mesh})", x=0.01, ha="left")
        figure.legend(handles=[_patch(role) for role in roles], loc="outside lower center", ncols=3)
    return figure


def _patch(role: str) -> object:
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS[role], label=role)


def _total(prediction: Prediction) -> str:
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[prediction.fits]
    known = "" if prediction.usable_bytes is None else f", {verdict}"
    return f"{prediction.peak.total / 1e9:.3g} GB{known}"
