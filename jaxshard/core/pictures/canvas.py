"""Make matplotlib figures in a common style (fonts, sizes, colours, light and dark), and write them to files.

A picture is dark where matplotlib's own text is light, as under `plt.style.use("dark_background")`.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxshard.core.local_path import local_path
from jaxshard.core.pictures.style import DARK, LIGHT, SIZE, Look, luminance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

_DPI = 150
_POINTS_PER_INCH = 72


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Look]]:
    """Return a context that yields an empty figure of a size in inches; drawing on it has the common style.

    Yields:
      (figure, look): the figure, which a notebook shows without a window, and the background and text colours.

    Raises:
      ImportError: matplotlib is not installed.

    Example:
      with drawing(WIDTH, 4) as (figure, look):
          figure.subplots().plot(losses)
    """
    try:
        import matplotlib.figure
        from matplotlib.colors import to_hex
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib (the extra viz)") from error
    look = DARK if luminance(to_hex(matplotlib.rcParams["text.color"])) > 0.5 else LIGHT
    with matplotlib.rc_context(_settings(look)):
        yield _picture_class()(figsize=(width, height), layout="constrained"), look


def _settings(look: Look) -> Any:
    """Return the colours and sizes of a picture as matplotlib's rc parameters."""
    from cycler import cycler

    inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    lines = ("axes.edgecolor", "xtick.color", "ytick.color")
    sizes = ("font.size", "axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(inks, look.ink),
        **dict.fromkeys(lines, look.muted),
        **dict.fromkeys(sizes, SIZE),
        **dict.fromkeys(papers, look.paper),
        "figure.titlesize": SIZE + 2,
        "font.family": "DejaVu Sans",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=look.lines),
        "grid.color": look.faint,
        "grid.linewidth": 0.9,
        "legend.frameon": False,
        "lines.linewidth": 2.2,
    }


def inches_of(text: str, points: float = SIZE) -> float:
    """Measure the width of a line of text in inches, at a font size in points."""
    from matplotlib.textpath import TextPath

    width: float = TextPath((0, 0), text.rstrip(), size=points).get_extents().width
    return width / _POINTS_PER_INCH


def fold(text: str, inches: float, points: float = SIZE) -> str:
    """Break a text into lines of at most `inches` width, at spaces and after slashes; longer words are not broken.

    Args:
      text: the text, in one line.
      inches: the width.
      points: the font size.

    Example:
      axes.set_ylabel(fold("decoder/layers/self_attention/query/kernel", 2.5))
    """
    lines = [""]
    for word in re.findall(r"[^ /]+[ /]*|[ /]+", text):
        longer = lines[-1] + word
        lines[-1:] = [longer] if not lines[-1] or inches_of(longer, points) <= inches else [lines[-1], word]
    return "\n".join(line.rstrip() for line in lines)


def write_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a .png, .svg or .pdf file. The same figure makes the same bytes.

    Raises:
      ValueError: a suffix that is none of .png, .svg and .pdf.

    Example:
        mesh = js.plan.planned_mesh("v5e:2x4", data=8)
        prediction = js.plan.predict(js.layout(js.fsdp(), mesh, init_fn, tx), loss_fn, batch, tx=tx, estimate=True)
        js.plan.write_picture(js.plan.roofline_figure(prediction), "roofline.png")
    """
    import matplotlib

    suffix = local_path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: pictures are written as {', '.join(FORMATS)}; give a file with such an ending")
    metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with matplotlib.rc_context({"svg.hashsalt": "jaxshard"}):
        figure.savefig(path, dpi=_DPI, metadata=metadata)


@functools.cache
def _picture_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows even without matplotlib's inline backend."""

        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=2 * _POINTS_PER_INCH)
            width, height = (round(_POINTS_PER_INCH * inches) for inches in self.get_size_inches())
            return file.getvalue(), {"width": width, "height": height}

    return Picture
