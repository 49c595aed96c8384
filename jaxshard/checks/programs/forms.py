"""List the shapes that a weight or its gradient may have in a collective, after gathers, transposes and reshapes.

A kernel f32[3,8,64] on each device, split over an axis of 4, may appear as [3,32,64] or [3,8,256], one of its three
blocks as [32,64] or [8,256], and each with dimensions joined or transposed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Shape, joined_shapes, normal_shape
from jaxshard.checks.programs.arguments import Argument

_MOST_BLOCKS = 256
"""The most blocks in a stack: a longer dimension is not taken for the number of blocks."""


def stacked_dim(parameters: Iterable[Argument]) -> int:
    """Return the dimension that counts blocks in a model with stacked blocks: 0, or 1 in models such as MaxText's.

    It is the dimension, of these two, in which more parameters have the same size.
    """
    shapes = [one.shape for one in parameters if len(one.shape) > 1]
    alike = [max(Counter(shape[dim] for shape in shapes).values(), default=0) for dim in (0, 1)]
    return 1 if alike[1] > alike[0] else 0


def forms_of(
    argument: Argument, mesh: Mesh, axes: Sequence[str], others: Sequence[str] = (), stacked: int = 0
) -> Mapping[Shape, float]:
    """Return the shapes that a parameter, or one block of it, may have after an all-gather, as {shape: share}.

    The share is the fraction of the parameter that an array of this shape has: 1 for the full parameter, 1/12 for one
    of 12 stacked blocks. If a shape fits both, as [144,192] does for an array [4,36,192] that is gathered four times,
    it is taken for a block.

    Args:
      argument: the parameter.
      mesh: the mesh.
      axes: the axes over which a collective gathers it, or sums its gradient.
      others: other axes that may split it, over which it may be gathered already.
      stacked: the dimension that counts blocks, if the parameter is stacked.
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
    """Yield the shapes that a sharded argument may have after an all-gather over `axes`.

    It may also be gathered over axes of `others`. If the text does not say which dimensions are split, all are tried.
    """
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
    """Return the fraction of a parameter in an array of this shape, if it is one of `count` chunks; else 0.

    A chunk is a part along one dimension, here a quarter of the columns, padded:

    >>> chunks_of({(4096, 32000): 1.0}, (4096, 8064), 4)
    0.25
    """
    for form, share in forms.items():
        others = [(full, part) for full, part in zip(sorted(form), sorted(shape)) if full != part]
        if len(form) == len(shape) > 1 and len(others) == 1 and count > 1:
            ((full, part),) = others
            if full <= count * part < 1.1 * full:
                return share / count
    return 0.0
