"""Count the memory of arrays on a TPU, which stores them in tiles: a scalar of 4 bytes takes 512.

A tile is 8 sublanes of 128 lanes of 32 bits, 4 KiB. f32[1024, 1024] fills its tiles, f32[7] does not:

    f32[1024, 1024]     1024 x 1024 elements    4 MiB
    f32[3, 64, 8]       8 x 64 padded to 128    3 * 8 * 128 elements, twice its bytes
    f32[7]              128 elements            512 bytes instead of 28
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.keys import words_of
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree

LANES, SUBLANES = 128, 8


def tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Count the bytes that an array takes on a TPU as an argument of a program, padded to tiles.

    Elements of fewer than 32 bits are packed: n = 32 / bits elements share a 32-bit word. For all others n is 1.

    - Two or more dimensions: the compiler chooses one dimension for the lanes of a tile and another one for its
      sublanes. The first is padded to a multiple of 128. The second is padded to a multiple of the smallest power of
      two that is at least its size, but of no more than 8 and no less than n. The compiler chooses the pair of
      dimensions that gives the fewest bytes.
    - One dimension: padded to a multiple of max(1024, 128 n) elements. Shorter arrays are padded to the next power of
      two, but to no less than 128 n elements. A scalar counts as an array of one element.
    - A typed random key counts as its uint32 words, in an additional last dimension. An array without elements takes
      no bytes.

    Source: the layouts of programs compiled by libtpu for v4, v5e, v5p, v6e and TPU7x, which are the same.

    Args:
      shape: the shape of one device's shard.
      dtype: the dtype of the array, which may be that of typed random keys.

    Returns:
      The bytes on one device.

    Example:
      >>> tiled_bytes((7,), jnp.float32), tiled_bytes((1024, 1024), jnp.float32), tiled_bytes((3, 64, 8), jnp.float32)
      (512, 4194304, 12288)
    """
    words = words_of(jax.ShapeDtypeStruct(shape, dtype))
    shape, dtype = words.shape, words.dtype
    if 0 in shape:
        return 0
    bits = jax.dtypes.itemsize_bits(dtype)
    packed = max(1, 32 // bits)
    if len(shape) < 2:
        size = math.prod(shape)
        least, most = LANES * packed, max(LANES * SUBLANES, LANES * packed)
        return _round_up(size, max(least, min(_next_power(size), most))) * bits // 8

    return min(padded_bytes(shape, dtype, *pair) for pair in itertools.permutations(range(len(shape)), 2))


def padded_bytes(shape: tuple[int, ...], dtype: Any, lanes: int, sublanes: int) -> int:
    """Count the padded bytes of an array if its dimension `lanes` is laid along lanes, `sublanes` along sublanes."""
    bits = jax.dtypes.itemsize_bits(dtype)
    tile = max(32 // bits, min(_next_power(shape[sublanes]), SUBLANES))
    rest = math.prod(shape) // (shape[lanes] * shape[sublanes])
    return rest * _round_up(shape[lanes], LANES) * _round_up(shape[sublanes], tile) * bits // 8


def tiled_argument_bytes(layout: Layout, batch: PyTree) -> int:
    """Count the bytes per device of a training step's arguments on a TPU, each array padded to tiles.

    The arguments are parameters, optimizer state, model state, batch, step number and random key; what the step
    computes in between, gradients included, is not counted. `layout.argument_bytes` counts the same without tiles.

    Args:
      layout: the layout, which has the shape and sharding of every array of the TrainState.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`.

    Returns:
      Bytes on each device.

    Example:
        tiled_argument_bytes(layout, batch)     # more than the bytes of the arrays: each is padded to tiles
    """
    mesh = layout.mesh
    arrays = [(one.placement, one.leaf.dtype) for one in layout.placed() if one.role != "grad"]
    placements = jax.tree.leaves(layout.batch_placements(batch))
    arrays += [(placement, x.dtype) for placement, x in zip(placements, jax.tree.leaves(batch), strict=True)]
    scalars = tiled_bytes((), jnp.int32) + tiled_bytes((), layout.shapes.key.dtype)
    return sum(tiled_bytes(placement.shard_shape(mesh), dtype) for placement, dtype in arrays) + scalars


def _next_power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple
