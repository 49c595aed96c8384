"""Draw the sharding of every array as coloured tiles on the mesh: devices of one colour hold the same shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.pictures.canvas import drawing, fold
from jaxshard.core.pictures.style import PALETTE, SIZE, WIDTH, Look, ink_on
from jaxshard.core.pictures.tiles import arrange, parts_held
from jaxshard.core.placement import Placement
from jaxshard.core.tree import bytes_of, path_str

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAVES = 10
_LINES = 64
"""The largest number of devices in a row between which lines are drawn."""

_NUMBERED = 32
"""The largest number of devices whose tiles show the number of their shard."""

_LABEL, _CAPTION = 2.7, 2.0
"""The largest width in inches of the labels on the left, and of those below the tiles."""

_LINE = 0.19
"""The height in inches of a line of text."""


def sharding_figure(layout: Layout, *, leaves: int = _LEAVES, title: str = "") -> Figure:
    """Draw the sharding of parameters, gradients and optimizer state: one tile for each device.

    Every picture is the mesh: its longest axis goes from left to right, the others from top to bottom. Devices of one
    colour and number hold the same shard of an array; a picture in a single colour is a replicated array. A white line
    separates devices with different shards, a dotted line devices with the same shard.

    Args:
      layout: the layout.
      leaves: the number of parameters to draw, the largest first; of equal shapes and placements only one is drawn.
      title: the title; by default the axes of the mesh.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: a layout without parameters.

    Example:
      sharding_figure(js.layout(js.zero2("data"), mesh, init_fn, tx)).savefig("layout.svg")
    """
    rows = _rows(layout)
    if not rows:
        raise ValueError("sharding_figure: the layout has no parameters")
    shown, rest = rows[:leaves], len(rows[leaves:])
    tall = max(0.85, min(1.3, 0.4 + 0.22 * len(arrange(layout.mesh)))) + 2 * _LINE
    with drawing(WIDTH, 1.1 + tall * len(shown)) as (figure, look):
        panels = figure.subplots(len(shown), 3, squeeze=False)
        for axes, name in zip(panels[0], ("parameter", "gradient", "optimizer state"), strict=True):
            axes.set_title(name, loc="center")
        for row, (label, placements) in zip(panels, shown, strict=True):
            for axes, placement in zip(row, placements, strict=True):
                _draw(axes, layout.mesh, placement, look)
            folded = "\n".join(fold(line, _LABEL, SIZE - 1) for line in label.split("\n"))
            row[0].set_ylabel(folded, rotation=0, ha="right", va="center", fontsize=SIZE - 1)
        more = f"; {rest} more are not drawn" if rest else ""
        words = (title or f"{layout.mesh.size} devices: {_directions(layout.mesh)}") + more
        figure.suptitle(words, x=0.01, ha="left", wrap=True)
    return figure


def _rows(layout: Layout) -> list[tuple[str, tuple[Placement | None, ...]]]:
    """Return (label, placements) of each parameter, the largest first; of equal parameters only the first."""
    arrays = jax.tree_util.tree_leaves_with_path(layout.shapes.params)
    roles = [
        jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (layout.params, layout.grads, layout.opt_params)
    ]
    found: dict[Any, tuple[int, str, int, tuple[Placement | None, ...]]] = {}
    for (path, x), *placements in zip(arrays, *roles, strict=True):
        key = (x.shape, *(None if one is None else (one.store, one.view) for one in placements))
        size, label, count, first = found.get(key, (bytes_of(x.shape, x.dtype), path_str(path), 0, tuple(placements)))
        found[key] = size, label, count + 1, first
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        (f"{label}{f' and {count - 1} more' if count > 1 else ''}\n{list(key[0])}, {human_bytes(size)}", placements)
        for key, (size, label, count, placements) in ordered
    ]


def _directions(mesh: Mesh) -> str:
    """Describe the axes of a mesh and their directions in the picture."""
    across = max(mesh.shape, key=lambda name: mesh.shape[name])
    down = [f"{name}={size}" for name, size in mesh.shape.items() if name != across and size > 1]
    return f"{across}={mesh.shape[across]} to the right" + (f", {', '.join(down)} downwards" if down else "")


def _draw(axes: Any, mesh: Mesh, placement: Placement | None, look: Look) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if placement is None:
        axes.text(0.5, 0.5, "frozen", ha="center", va="center")
        return
    from matplotlib.colors import to_rgb

    parts = parts_held(mesh, placement)
    count = int(parts.max()) + 1
    picture = parts[arrange(mesh)]
    colours = _colours(count)
    axes.imshow([[to_rgb(colours[part]) for part in row] for row in picture], aspect="auto", interpolation="nearest")
    for rows, draw in ((picture, axes.axhline), (picture.T, axes.axvline)):
        for edge in range(1, len(rows)) if len(rows) <= _LINES else ():
            same = bool((rows[edge - 1] == rows[edge]).all())
            draw(edge - 0.5, color=look.paper, linewidth=0.7 if same else 1.5, linestyle=":" if same else "-")
    for (y, x), part in np.ndenumerate(picture) if mesh.size <= _NUMBERED else ():
        ink = ink_on(colours[part])
        axes.text(x, y, str(part), ha="center", va="center_baseline", color=ink, fontsize=SIZE - 2)
    shape = fold(str(list(placement.shard_shape(mesh))), _CAPTION, SIZE - 1)
    caption = "replicated" if count == 1 else f"1/{count} on each:\n{shape}"
    axes.set_xlabel(caption, fontsize=SIZE - 1)
    axes.spines[:].set_visible(False)


def _colours(count: int) -> Sequence[str]:
    """Return one colour for each shard: from the palette, or steps of cividis, which goes from blue to yellow."""
    import matplotlib
    from matplotlib.colors import to_hex

    if count <= len(PALETTE):
        return PALETTE[:count]
    shades = matplotlib.colormaps["cividis"]
    return [to_hex(shades(number / (count - 1))) for number in range(count)]
