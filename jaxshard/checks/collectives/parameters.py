"""The parameters of a layout, each with the placements of the parameter, its gradient and its optimizer state."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.tree import BLOCKS, path_str


class Parameter(NamedTuple):
    """A parameter, with the placements of the parameter itself, its gradient and its optimizer state.

    Attributes:
      path: such as "blocks/mlp_in/kernel".
      shape: the logical, unpadded shape, stacked blocks included.
      dtype: the dtype of the parameter.
      param: the placement of the parameter.
      grad: the placement of its gradient; None if it is frozen.
      opt: the placement in which parameter and gradient are passed to the optimizer; None if the parameter is frozen.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    param: Placement
    grad: Placement | None
    opt: Placement | None


def parameters_of(layout: Layout) -> list[Parameter]:
    """List the parameters of a layout, in the order of the tree."""
    arrays = jax.tree_util.tree_leaves_with_path(layout.shapes.params)
    leaves = partial(jax.tree.leaves, is_leaf=lambda x: x is None)  # None, of a frozen parameter, is a leaf here
    placements = zip(*map(leaves, (layout.params, layout.grads, layout.opt_params)), strict=True)
    return [
        Parameter(path_str(path), tuple(x.shape), x.dtype, *three)
        for (path, x), three in zip(arrays, placements, strict=True)
    ]


def is_stacked(path: str) -> bool:
    """Return True if the array at this path is stacked over blocks, along its first dimension."""
    return path.startswith(f"{BLOCKS}/")


def rank_of(path: str, shape: tuple[int, ...]) -> int:
    """Return the number of dimensions of a parameter, without the first one if it counts stacked blocks."""
    return len(shape) - is_stacked(path)


def longest_dim(layout: Layout) -> int:
    """Return the size of the longest dimension of any parameter."""
    return max((size for x in jax.tree.leaves(layout.shapes.params) for size in x.shape), default=1)


def tensor_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which weights stay split while they are used (`js.tensor`), without expert axes."""
    used = {axis for placement in jax.tree.leaves(layout.params) for axis in axes_of(placement.use)}
    return tuple(axis for axis in layout.mesh.axis_names if axis in used and axis not in expert_axes(layout))


def expert_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which tokens are sent to their experts, in mesh order."""
    axes = () if layout.expert is None else layout.expert.axis
    return tuple(axis for axis in layout.mesh.axis_names if axis in axes)
