"""What arrays take on a TPU, where memory comes in tiles: the same array may take a hundred times its bytes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree

_LANES, _SUBLANES = 128, 8


def tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes that an array (one device's shard) takes on a TPU as argument of a program, padded to tiles.

    >>> tiled_bytes((7,), jnp.float32), tiled_bytes((1024, 1024), jnp.float32)
    (512, 4194304)

    Types narrower than 32 bits are packed: n = 32 / bits neighbours share a word, n = 1 for wider types.

    - Two or more dimensions: one dimension is padded to a multiple of 128 lanes and another one to one of its
      sublanes, the power of two from it on, at most 8 but at least n; of all ordered pairs of dimensions the one that
      takes least. f32[3, 64, 8] is 3 x 8 x 128 elements, not 3 x 64 x 128.
    - One dimension: a multiple of 1024 elements (of 128 n if that is more), a shorter one the power of two from it on,
      at least 128 n. A scalar is one of one element.
    - A typed random key has its words as last dimension. An array without elements takes nothing.

    Source: the layouts of programs compiled by libtpu for v4, v5e, v5p, v6e and TPU7x, which are the same.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return tiled_bytes(words.shape, words.dtype)
    if 0 in shape:
        return 0
    bits = _bits(dtype)
    packed = max(1, 32 // bits)
    if len(shape) < 2:
        size = math.prod(shape)
        least, most = _LANES * packed, max(_LANES * _SUBLANES, _LANES * packed)
        return _round_up(size, max(least, min(_power_from(size), most))) * bits // 8

    def padded(lanes: int, sublanes: int) -> int:
        tile = max(packed, min(_power_from(shape[sublanes]), _SUBLANES))
        rest = math.prod(shape) // (shape[lanes] * shape[sublanes])
        return rest * _round_up(shape[lanes], _LANES) * _round_up(shape[sublanes], tile)

    return min(padded(*pair) for pair in itertools.permutations(range(len(shape)), 2)) * bits // 8


def tiled_argument_bytes(layout: Layout, batch: PyTree) -> int:
    """`layout.argument_bytes(batch)` on a TPU: bytes per device of a step's arguments, each padded to tiles.

    `batch` is a tree of global arrays or ShapeDtypeStructs.
    """
    mesh = layout.mesh
    resting = [(p.placement, p.leaf.dtype) for p in layout.placed() if p.role != "grad"]
    rows = [(layout.batch_placement(x), x.dtype) for x in jax.tree.leaves(batch)]
    arrays = sum(tiled_bytes(placement.shard_shape(mesh), dtype) for placement, dtype in resting + rows)
    return arrays + tiled_bytes((), jnp.int32) + tiled_bytes((), layout.shapes.key.dtype)


def _bits(dtype: Any) -> int:
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits  # four-bit integers say an itemsize of one byte
    return jnp.finfo(dtype).bits if dtype.itemsize == 1 and dtype != jnp.bool_ else 8 * dtype.itemsize


def _power_from(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple
