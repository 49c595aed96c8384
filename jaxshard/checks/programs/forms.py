"""The shapes in which a compiler moves a weight or its gradient: known by its elements, whatever their order.

A kernel f32[3,8,64] on each device, of which an axis of 4 splits some dimension, may be met as [3,32,64] or [3,8,256],
one of three blocks of these as [32,64] or [8,256], and each with its dimensions joined or in another order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Shape, joined_shapes, normal_shape
from jaxshard.checks.programs.arguments import Argument

_MOST_BLOCKS = 256
"""Blocks in a stack at most: a dimension of a vector that is longer counts no blocks."""


def stacked_dim(parameters: Iterable[Argument]) -> int:
    """Return which dimension counts the blocks of a model that has stacked ones: the first or, in MaxText, the second.

    It is the one that has the same size in most parameters.
    """
    shapes = [one.shape for one in parameters if len(one.shape) > 1]
    alike = [max(Counter(shape[dim] for shape in shapes).values(), default=0) for dim in (0, 1)]
    return 1 if alike[1] > alike[0] else 0


def forms_of(
    argument: Argument, mesh: Mesh, axes: Sequence[str], others: Sequence[str] = (), stacked: int = 0
) -> Mapping[Shape, float]:
    """Return the normal shapes of an array or of one block of it, whole over some axes, each with its share of it.

    Where a shape may be that of all and of one block, as [144,192] of an array [4,36,192] split four times, it is taken
    for the block's.

    Args:
      argument: the array, a parameter.
      mesh: the mesh.
      axes: over which a collective gathers it, or sums its gradient.
      others: axes that may split it too, over which it may be whole already.
      stacked: the dimension that counts blocks, if it is a stack of some.
    """
    forms: dict[Shape, float] = {}
    for shape in _unsplit(argument, mesh, axes, others):
        parts = [(shape, 1.0)]
        if len(shape) > max(1, stacked) and 1 < shape[stacked] <= _MOST_BLOCKS:
            parts.append((shape[:stacked] + shape[stacked + 1 :], 1 / shape[stacked]))
        for part, share in parts:
            for joined in joined_shapes(part):
                form = normal_shape(joined)
                forms[form] = min(share, forms.get(form, 1.0))
    return forms


def _unsplit(argument: Argument, mesh: Mesh, axes: Sequence[str], others: Sequence[str]) -> Iterator[Shape]:
    """The shapes of an array made whole over axes that split it; where the text does not say how, over any that may."""
    every = (*axes, *(axis for axis in others if axis not in axes))
    known = argument.splits
    dims = range(len(argument.shape))
    options: list[list[int | None]] = []
    for axis in every:
        split = [dim for dim in dims if known is None or axis in known[dim]]
        options.append([*split, *([None] if known is None or axis not in axes or not split else [])])
    for chosen in itertools.product(*options):
        shape = list(argument.shape)
        for dim, axis in zip(chosen, every):
            if dim is not None:
                shape[dim] *= mesh.shape[axis]
        yield tuple(shape)


def chunks_of(forms: Mapping[Shape, float], shape: Shape, count: int) -> float:
    """Return the share that an array has of a parameter that is moved in `count` chunks along one dimension, else 0.

    >>> chunks_of({(4096, 32000): 1.0}, (4096, 8064), 4)
    0.25
    """
    for form, share in forms.items():
        others = [(whole, part) for whole, part in zip(sorted(form), sorted(shape)) if whole != part]
        if len(form) == len(shape) > 1 and len(others) == 1 and count > 1:
            ((whole, part),) = others
            if whole <= count * part < 1.1 * whole:
                return share / count
    return 0.0
