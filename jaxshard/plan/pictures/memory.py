"""The memory of a step by role, one bar for each strategy, beside what the chip has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxshard.plan.pictures.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SIZE,
    SKY,
    VERMILLION,
    YELLOW,
    ink_on,
    new_figure,
    style_axes,
)  # fmt: skip
from jaxshard.plan.prediction import ROLES, Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "parameters": BLUE,
    "gradients": VERMILLION,
    "optimizer state": GREEN,
    "model state": GREY,
    "batch": BLACK,
    "kept activations": ORANGE,
    "gathered weights": SKY,
    "logits": PURPLE,
    "temporaries": YELLOW,
}
_SEEN = 0.001
"""The share of the picture's width from which on a bar is seen, and its role named."""

_WRITTEN = 0.055
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
    figure = new_figure(12, 2.4 + 0.62 * len(predictions))
    axes = figure.subplots()
    style_axes(axes, grid="x")
    for row, prediction in enumerate(predictions.values()):
        left = 0.0
        for role in roles:
            size = prediction.peak.by_role.get(role, 0) / 1e9
            colour = _COLOURS[role]
            axes.barh(row, size, left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.8)
            if size > _WRITTEN * widest:
                axes.text(
                    left + size / 2, row, f"{size:.3g}", ha="center", va="center", color=ink_on(colour), fontsize=SIZE
                )
            left += size
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        place = left + 0.012 * widest
        axes.text(place, row, _total(prediction), va="center", fontsize=SIZE, fontweight="bold", bbox=box, zorder=5)
    for limit in limits:
        axes.axvline(limit / 1e9, color=BLACK, linestyle="--", linewidth=1.8)
        axes.annotate(
            f"usable: {limit / 1e9:.4g} GB", (limit / 1e9, 1), xycoords=("data", "axes fraction"), xytext=(-4, 4),
            textcoords="offset points", ha="right", fontsize=SIZE,
        )  # fmt: skip
    axes.set_xlim(0, widest * 1.25)
    axes.set_yticks(range(len(predictions)), list(predictions))
    axes.invert_yaxis()
    axes.set_xlabel("GB on each device at the fullest moment", fontsize=SIZE)
    mesh = ", ".join(f"{axis}={size}" for axis, size in first.mesh.items())
    chip = f" {first.chip.name}" if first.chip is not None else " devices"
    figure.suptitle(title or f"{first.devices}{chip} ({mesh})", fontsize=SIZE + 2)
    handles = [_patch(role) for role in roles]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(roles)), fontsize=SIZE, frameon=False)
    return figure


def _patch(role: str) -> object:
    from matplotlib.patches import Patch

    return Patch(facecolor=_COLOURS[role], edgecolor="white", label=role)


def _total(prediction: Prediction) -> str:
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[prediction.fits]
    known = "" if prediction.usable_bytes is None else f", {verdict}"
    return f"{prediction.peak.total / 1e9:.3g} GB{known}"
