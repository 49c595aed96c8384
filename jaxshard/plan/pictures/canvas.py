"""What all pictures share: colours, figures that no window holds, and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#4D4D4D"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY)
"""Okabe and Ito's colours (jfly.uni-koeln.de/color), which colour-blind people tell apart, and a dark grey."""

DARK = (BLUE, BLACK, GREEN, VERMILLION, GREY)
"""Those on which white letters are read."""

SIZE = 12
"""Points of text: legible where the picture is shown at half its size."""

_FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, its letters of `SIZE`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def style_axes(axes: Any, *, grid: str = "") -> None:
    """Leave out the frame but for left and bottom; draw light lines along x or y behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SIZE)
    if grid:
        axes.grid(axis=grid, color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)


def ink_on(colour: str) -> str:
    """Return the colour of letters that are read on a colour."""
    return "white" if colour in DARK else "black"


def write_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, whose suffix says its kind.

    Raises:
      ValueError: a suffix that is none of .png, .svg and .pdf.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ValueError(f"{path}: pictures are written as {', '.join(_FORMATS)}; give a file with such an ending")
    figure.savefig(path, dpi=150)
