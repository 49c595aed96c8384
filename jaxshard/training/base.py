"""The frozen base weights of a model with low-rank factors (`js.lora`): checksums, merging, and leaving them out.

Training with `js.lora` starts from the weights of a model without factors (`init_from=` of `js.init`). A checkpoint has
no copy of these base weights, only checksums; `init_from=` of `js.restore` passes them again, and the checksums are
compared. Exports merge the base weights and the factors into one matrix.
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
    """Merge each matrix's base weights and low-rank factors into one array; the compiler chooses the collectives.

    Args:
      params: the parameters of a TrainState.
      layout: the layout by which they are stored.

    Returns:
      (parameters in which each factored matrix is one array, stored like its base weights; the layout for them, see
      `matrix_layout`). For a model without factors, the two arguments unchanged.
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
    """Merge each matrix's base weights and low-rank factors into one array; keep other parameters.

    `params` may be parameters as the layout stores them, or parameters in model order.
    """
    if not has_low_rank(params):
        return params
    views = jax.tree.leaves(jax.tree.map(lambda placement: placement.view, layout.params))
    is_stored = all(x.shape == view.stored for x, view in zip(jax.tree.leaves(params), views))
    return merge_stored(params, layout)[0] if is_stored else jax.jit(merge_lora)(params)


def matrix_layout(layout: Layout) -> Layout:
    """Return a layout for parameters whose factors were merged: each matrix has the placement of its base weights.

    Only `params` and `shapes.params` of the layout change; the placements of gradients and optimizer state stay those
    of the model with factors. For a model without factors, return `layout` itself.
    """
    if not has_low_rank(layout.shapes.params):
        return layout
    placements = map_low_rank(lambda x: x.base, layout.params)
    return replace(layout, params=placements, shapes=layout.shapes._replace(params=matrix_shapes(layout.shapes.params)))


def without_base(run: TrainState, layout: Layout) -> TrainState:
    """Replace the frozen base weights of a TrainState by None, so that a checkpoint leaves them out."""
    saved = jax.tree.map(lambda given: not given, layout.base)
    return run._replace(params=select(saved, run.params))


def checksum_base(params: PyTree, layout: Layout) -> dict[str, str]:
    """Compute a checksum of every array of frozen base weights of a `js.lora` model.

    The checksum is of the logical array, so it is the same for every layout. Collectives: an all-reduce of a scalar for
    each array.

    Args:
      params: the stored parameters; parameters other than base weights may be None.
      layout: the layout by which they are stored.

    Returns:
      {path: dtype, logical shape and checksum as text}, such as "int8[64, 48] 9f3ac01e".
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
    """Hash each element's bits with its index in the logical array, and sum the hashes modulo 2^32, without padding.

    The sum does not depend on order, so every layout gives the same number, and each device hashes its own elements.
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
    """Return for each element of a stored array its index along dimension `dim` of the logical array.

    `view` says how the array is padded and reshaped for storage.
    """
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
