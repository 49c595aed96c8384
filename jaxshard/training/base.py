"""The frozen base of a model with low-rank factors, which the user passes again and checkpoints leave out.

Runs of `js.lora` start from the weights of a model without factors (`init_from=` of `js.init` and `js.restore`); a
checkpoint has checksums of the base made from them. Exports merge base and factors into matrices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from jaxshard.core.layout import Layout, select
from jaxshard.core.low_rank import LowRank, has_low_rank, is_low_rank, map_low_rank, matrix_shapes, merge_lora
from jaxshard.core.placement import View
from jaxshard.core.stored import unstore
from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


def merge_stored(params: PyTree, layout: Layout) -> tuple[PyTree, Layout]:
    """Merge low-rank factors of stored parameters into matrices; the compiler chooses the collectives.

    Args:
      params: the parameters of a run.
      layout: how they are stored.

    Returns:
      (the matrices, each stored like its base; `matrix_layout`). Without factors, both arguments.
    """
    if not has_low_rank(params):
        return params, layout

    def merge(x: Any, placements: Any) -> Any:
        if not is_low_rank(x):
            return x
        view = placements.base.view

        @partial(jax.jit, out_shardings=placements.base.sharding(layout.mesh))
        def merged(x: LowRank) -> jax.Array:
            matrix: LowRank = unstore(placements, x)
            stored: jax.Array = view.apply(matrix.weight())
            return stored

        return merged(x)

    return jax.tree.map(merge, params, layout.params, is_leaf=is_low_rank), matrix_layout(layout)


def merge_given(params: PyTree, layout: Layout) -> PyTree:
    """Merge low-rank factors of parameters, stored or in model order, into matrices; keep other parameters."""
    if not has_low_rank(params):
        return params
    views = jax.tree.leaves(jax.tree.map(lambda placement: placement.view, layout.params))
    is_stored = all(x.shape == view.stored for x, view in zip(jax.tree.leaves(params), views))
    return merge_stored(params, layout)[0] if is_stored else jax.jit(merge_lora)(params)


def matrix_layout(layout: Layout) -> Layout:
    """Return the layout of the model without factors, in which each matrix has the placement of its base.

    Its gradients and optimizer state are still those of the factors. Without factors, return the layout itself.
    """
    if not has_low_rank(layout.shapes.params):
        return layout
    placements = map_low_rank(lambda x: x.base, layout.params)
    return replace(layout, params=placements, shapes=layout.shapes._replace(params=matrix_shapes(layout.shapes.params)))


def without_base(run: TrainState, layout: Layout) -> TrainState:
    """Replace the parameters of `layout.base` by None."""
    saved = jax.tree.map(lambda given: not given, layout.base)
    return run._replace(params=select(saved, run.params))


def checksum_base(params: PyTree, layout: Layout) -> dict[str, str]:
    """Compute a checksum of every array of the base, by path, such as "int8[64, 48] 9f3ac01e".

    It is the checksum of the logical array, for any layout. Collectives: an all-reduce of a scalar for each array.

    Args:
      params: the stored parameters; parameters outside the base may be None.
      layout: how they are stored.
    """
    arrays = jax.tree_util.tree_leaves_with_path(select(layout.base, params))
    views = [placement.view for placement in jax.tree.leaves(select(layout.base, layout.params))]
    sums = [_checksum(x, view) for (_, x), view in zip(arrays, views, strict=True)]
    return {
        path_str(path): f"{x.dtype}{list(view.logical)} {int(total):08x}"
        for (path, x), view, total in zip(arrays, views, sums, strict=True)
    }


@partial(jax.jit, static_argnums=1)
def _checksum(x: Shaped[Array, "*stored"], view: View) -> UInt32[Array, ""]:
    """Sum, modulo 2^32, a hash of each element's bits and its index in the logical array, without padding.

    The sum does not depend on order, so every layout gives the same number, and no array moves.
    """
    index, inside = jnp.zeros((), jnp.uint32), jnp.ones((), bool)
    for dim, size in enumerate(view.logical):
        place = _places(view, dim)
        index, inside = index * jnp.uint32(size) + place, inside & (place < size)
    bits = lax.bitcast_convert_type(x, f"uint{8 * min(4, x.dtype.itemsize)}").astype(jnp.uint32)
    index, inside = (jnp.expand_dims(one, range(one.ndim, bits.ndim)) for one in (index, inside))
    hashes = _hash(bits ^ _hash(index))
    for dim in range(index.ndim, bits.ndim):  # two words of an element of 64 bits
        hashes = _hash(hashes + lax.broadcasted_iota(jnp.uint32, hashes.shape, dim))
    return jnp.where(inside, hashes, 0).sum(dtype=jnp.uint32)


def _places(view: View, dim: int) -> jax.Array:
    """Return the index along a logical dimension of each stored element."""
    dims = range(view.extra_dims + 1) if dim == 0 else [view.stored_dim(dim)]
    place = jnp.zeros((), jnp.uint32)
    for one in dims:
        place = place * jnp.uint32(view.stored[one]) + lax.broadcasted_iota(jnp.uint32, view.stored, one)
    return place


def _hash(x: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """Mix the bits of each number (the last step of MurmurHash3 by Austin Appleby, which is in the public domain)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
