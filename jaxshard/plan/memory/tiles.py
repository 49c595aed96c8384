"""Memory that arrays take on a TPU, where arrays are stored in tiles: a small one may take a hundred times its bytes.

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

    Types narrower than 32 bits are packed: n = 32 / bits neighbours share a word, n = 1 for wider types.

    - Two or more dimensions: one dimension is padded to a multiple of 128 lanes and another one to a multiple of its
      sublanes: the next power of two of its size, at most 8 but at least n. Of all ordered pairs of dimensions the
      compiler takes the one that needs least.
    - One dimension: padded to a multiple of 1024 elements (of 128 n if that is more); a shorter one to the next power
      of two, at least 128 n. A scalar is an array of one element.
    - A typed random key has its words as last dimension. An array without elements takes nothing.

    Source: the layouts of programs compiled by libtpu for v4, v5e, v5p, v6e and TPU7x, which are the same.

    Args:
      shape: of one device's shard.
      dtype: a dtype, or that of typed random keys.

    Returns:
      Bytes on one device.

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
    """Count the bytes of an array of two or more dimensions, of which one lies along the lanes, one along sublanes."""
    bits = jax.dtypes.itemsize_bits(dtype)
    tile = max(32 // bits, min(_next_power(shape[sublanes]), SUBLANES))
    rest = math.prod(shape) // (shape[lanes] * shape[sublanes])
    return rest * _round_up(shape[lanes], LANES) * _round_up(shape[sublanes], tile) * bits // 8


def tiled_argument_bytes(layout: Layout, batch: PyTree) -> int:
    """Count the bytes per device of a training step's arguments on a TPU, each array padded to tiles.

    The arguments are parameters, optimizer state, model state, batch, step number and random key; what the step
    computes in between, gradients included, is not counted. `layout.argument_bytes` counts the same without tiles.

    Args:
      layout: where the arrays of the run live.
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
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple
