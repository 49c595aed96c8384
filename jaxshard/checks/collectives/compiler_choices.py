"""Collectives that a compiler derives by itself: how many and of which shape no placement says exactly.

They are promised as "as needed", or up to a number and a size, never as certain. Over tensor axes these are
activations, under `js.auto` sums over rows as well, and on a TPU what is done to shards that are no whole tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from jaxshard.checks.collectives.expected import Expected, Shape
from jaxshard.checks.collectives.parameters import Parameter, rank_of, tensor_axes
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import axes_of
from jaxshard.core.strategy_parts import Tensor, parts_of
from jaxshard.core.tree import path_str

_SEQUENCE = ("sequence", "length", "positions")
"""Logical names of a sequence's dimension."""


def activations(layout: Layout, compiler_chooses: bool) -> Iterator[Expected]:
    """Yield the collectives of activations: over tensor axes, and where the compiler chooses over batch axes.

    A product with a weight whose contracted dimension is split leaves partial sums, hence all-reduces; a sequence that
    a rule splits is gathered before such a product and its sums are scattered after it.
    """
    one = Expected("all-reduce", tensor_axes(layout), None, None, 0, None, "activations")
    yield one
    if splits_sequence(layout):
        for kind in ("all-gather", "reduce-scatter"):
            yield replace(one, kind=kind, what="activations split along the sequence")
    if compiler_chooses:
        # Statistics of a batch have a number per feature: no more than the longest dimension of a parameter.
        longest = max(max(x.shape, default=1) for x in jax.tree.leaves(layout.shapes.params))
        sums = replace(one, axes=layout.batch_axes, limit=longest, what="sums over rows")
        yield sums
        yield replace(sums, kind="all-gather")


def splits_sequence(layout: Layout) -> bool:
    """Return True if a rule of `js.tensor` may split activations along the sequence."""
    rules = [part.rules for part in parts_of(layout.strategy) if isinstance(part, Tensor)]
    return any(rule.fate(name) in ("split", "split or whole") for rule in rules for name in _SEQUENCE)


def feature_gathers(layout: Layout, parameters: Sequence[Parameter]) -> Iterator[Expected]:
    """Yield gathers of vectors that are whole over the tensor axes, but made by features that are split there.

    Such are scale and bias of a norm after a product whose columns are split, and the norm's averages.
    """
    tensor = tensor_axes(layout)
    vectors = [(one.path, one.shape, one.dtype) for one in parameters if not set(axes_of(one.param.use)) & set(tensor)]
    state = jax.tree_util.tree_leaves_with_path(layout.shapes.state)
    vectors += [(path_str(path), tuple(x.shape), x.dtype) for path, x in state]
    for path, shape, dtype in vectors:
        if rank_of(path, shape) == 1:
            yield Expected("all-gather", tensor, shape[-1:], dtype, 0, 2 * math.prod(shape[:-1]), f"features of {path}")


def fewest_features(layout: Layout, size: int) -> int:
    """Return how many elements of a vector a device has if the compiler splits it over the tensor axes."""
    return max(1, size // axis_size(layout.mesh, tensor_axes(layout)))


def border_permutes(one: Expected, shard: Shape) -> Expected:
    """Return what crosses the borders of the shards when `one`, a reduce-scatter, leaves shards of this shape.

    A TPU scatters arrays padded to whole tiles. Where a shard is no whole number of tiles, padded shards begin at other
    elements than those wanted, and the compiler permutes what is off.
    """
    tiles = [1] * len(shard[:-2]) + [8, 128][-len(shard) :]
    padded = tuple(size + -size % tile for size, tile in zip(shard, tiles, strict=True))
    most = 0 if one.most is None or padded == shard else 2 * one.most
    what = f"borders of the {one.what}"
    return replace(one, kind="collective-permute", shape=padded, least=0, most=most, what=what, unpadded=1)
