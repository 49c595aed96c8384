"""The sharding of every array as coloured tiles on the mesh: devices of one colour hold the same part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.pictures.canvas import drawing, fold, inches_of
from jaxshard.core.pictures.style import PALETTE, SIZE, WIDTH, Look, ink_on
from jaxshard.core.pictures.tiles import arrange, parts_held
from jaxshard.core.placement import Placement
from jaxshard.core.tree import bytes_of, path_str

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAVES = 10
_LINES = 64
"""The longest line of devices between which lines are drawn."""

_NUMBERED = 32
"""The largest number of devices whose tiles have the number of their part in them."""

_LABEL = 2.7
"""The most inches of the labels on the left."""

_BETWEEN = 0.15
"""Inches between pictures of the mesh."""

_LINE = 0.19
"""Inches of a line of text."""


def sharding_figure(layout: Layout, *, leaves: int = _LEAVES, title: str = "") -> Figure:
    """Draw where parameters, their gradients and their optimizer state rest: one tile for each device.

    Every picture is the mesh: its longest axis goes from left to right, the others from top to bottom. Devices of one
    colour, and one number, hold the same part of an array; a picture of one colour is an array that all have whole.
    Between devices with other parts is a white line, between those with the same a dotted one.

    Args:
      layout: where the arrays live.
      leaves: so many parameters, the largest first; of equal ones that rest alike only one is drawn.
      title: above the picture; by default the axes of the mesh.

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
    devices, down = layout.mesh.size, len(arrange(layout.mesh))
    with drawing(WIDTH, 1) as (figure, look):
        labels = [_folded(label) for label, _ in shown]
        left = max(inches_of(line, SIZE - 1) for label in labels for line in label.split("\n"))
        wide = (WIDTH - left) / 3 - _BETWEEN
        tall = [_inches(label, placements, layout.mesh, down, wide) for label, (_, placements) in zip(labels, shown)]
        figure.set_figheight(1.1 + sum(tall))
        panels = np.atleast_2d(figure.subplots(len(shown), 3, height_ratios=tall))
        for row, label, (_, placements) in zip(panels, labels, shown, strict=True):
            for axes, placement, name in zip(row, placements, ("parameter", "gradient", "optimizer state")):
                _draw(axes, layout.mesh, placement, wide, look)
                if axes in panels[0]:
                    axes.set_title(name, loc="center")
            row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=SIZE - 1)
        more = f"; {rest} more are not drawn" if rest else ""
        words = (title or f"{devices} devices: {_directions(layout.mesh)}") + more
        figure.suptitle(words, x=0.01, ha="left", wrap=True)
    return figure


def _inches(label: str, placements: Sequence[Placement | None], mesh: Mesh, down: int, wide: float) -> float:
    """The height of a row: its tiles and the lines below them, or its label."""
    captions = [_caption(one, mesh, wide) for one in placements if one is not None]
    lines = max((text.count("\n") for text in captions), default=0)
    tiles = max(0.85, min(1.3, 0.4 + 0.22 * down))
    return max(tiles + _LINE * lines, _LINE * (2 + label.count("\n")))


def _folded(label: str) -> str:
    """A label whose lines are no wider than there is room."""
    return "\n".join(fold(line, _LABEL, SIZE - 1) for line in label.split("\n"))


def _caption(placement: Placement, mesh: Mesh, wide: float) -> str:
    """The share of an array that a device holds, and its shape: below it where both are wider than so many inches."""
    count = int(parts_held(mesh, placement).max()) + 1
    if count == 1:
        return "whole on each"
    share, shape = f"1/{count} on each:", str(list(placement.shard_shape(mesh)))
    both = f"{share} {shape}"
    return both if inches_of(both, SIZE - 1) <= wide else f"{share}\n{fold(shape, wide, SIZE - 1)}"


def _rows(layout: Layout) -> list[tuple[str, tuple[Placement | None, ...]]]:
    """Label and placements of each parameter, the largest first; of those that are alike the first one."""
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
    """The axes of a mesh, and where they go in the picture."""
    across = max(mesh.shape, key=lambda name: mesh.shape[name])
    down = [f"{name}={size}" for name, size in mesh.shape.items() if name != across and size > 1]
    return f"{across}={mesh.shape[across]} to the right" + (f", {', '.join(down)} downwards" if down else "")


def _draw(axes: Any, mesh: Mesh, placement: Placement | None, wide: float, look: Look) -> None:
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
    _draw_borders(axes, picture, look)
    if mesh.size <= _NUMBERED:
        for (y, x), part in np.ndenumerate(picture):
            ink = ink_on(colours[part])
            axes.text(x, y, str(part), ha="center", va="center_baseline", color=ink, fontsize=SIZE - 2)
    axes.set_xlabel(_caption(placement, mesh, wide), fontsize=SIZE - 1)
    axes.spines[:].set_visible(False)


def _draw_borders(axes: Any, picture: np.ndarray, look: Look) -> None:
    """White lines between neighbours that hold different parts, dotted ones where they hold the same."""
    down, across = picture.shape
    for along, size in (("x", across), ("y", down)):
        for edge in range(1, size) if size <= _LINES else ():
            before, after = (picture.take(at, axis=1 if along == "x" else 0) for at in (edge - 1, edge))
            same = bool((before == after).all())
            draw = axes.axvline if along == "x" else axes.axhline
            draw(
                edge - 0.5,
                color=look.paper,
                linewidth=0.7 if same or across > 16 else 1.5,
                linestyle=":" if same else "-",
            )


def _colours(count: int) -> Sequence[str]:
    """One colour for each part: those of the palette, or so many steps of cividis, which goes from blue to yellow."""
    import matplotlib
    from matplotlib.colors import to_hex

    if count <= len(PALETTE):
        return PALETTE[:count]
    shades = matplotlib.colormaps["cividis"]
    return [to_hex(shades(number / (count - 1))) for number in range(count)]
