"""Divide arrays into blocks of neighbouring elements, for block-wise quantization with a scale for each block.

A block is a box: it extends along the last dimension and, if this dimension is short, along the dimensions before it.
It has the size 1 in all others, so that splitting leading dimensions over devices cuts no block:

    [1024, 4096]      boxes [1, 128]         scales [1024, 32]
    [50257, 768]      boxes [1, 192]         scales [50257, 4]
    [768, 12, 64]     boxes [1, 3, 64]       scales [768, 4, 1]
    [3, 3, 64, 64]    boxes [1, 1, 2, 64]    scales [3, 3, 32, 1]

Boxes depend only on the shape of the logical array, never on its sharding.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float32

SMALLEST = 128
"""The fewest elements of a block, the lanes of a TPU: so there is at most one scale per 128 elements."""

LARGEST = 256
"""The most elements of a block: an outlier makes only the elements of its own block less precise."""


def box_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the blocks into which an array is divided for 8-bit storage, with one scale per block.

    Blocks have 128 to 256 neighbouring elements if the array's shape allows it.

    Example:
        >>> box_of((1024, 4096)), box_of((768, 12, 64)), box_of((1600, 1600))
        ((1, 128), (1, 3, 64), (1, 200))
    """
    box = [1] * len(shape)
    for dim in range(len(shape) - 1, -1, -1):
        inner = math.prod(box)
        box[dim] = _length(shape[dim], -(-SMALLEST // inner), LARGEST // inner)
        if math.prod(box) >= SMALLEST or box[dim] < shape[dim]:
            break
    return tuple(box)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension of an array of this shape: (1024, 4096) -> (1024, 32).

    It is the shape of the array of scales, which has one scale per block.
    """
    return tuple(-(-size // length) for size, length in zip(shape, box_of(shape), strict=True))


def largest_per_block(x: Float32[Array, "*shape"]) -> Float32[Array, "*blocks"]:
    """Return the largest magnitude in each block of an array: f32[1024, 4096] -> f32[1024, 32] for blocks [1, 128]."""
    largest = jnp.abs(x)
    for dim, (size, length) in enumerate(zip(x.shape, box_of(x.shape), strict=True)):
        if length > 1:
            count = -(-size // length)
            widths = [(0, count * length - size if i == dim else 0) for i in range(x.ndim)]
            padded = jnp.pad(largest, widths) if count * length != size else largest
            cut = padded.reshape(*padded.shape[:dim], count, length, *padded.shape[dim + 1 :])
            largest = cut.max(axis=dim + 1)
    return largest


def spread(scales: Float32[Array, "*blocks"], shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
    """Repeat the scale of each block for all elements of the block: f32[1024, 32] -> f32[1024, 4096]."""
    for dim, (size, length) in enumerate(zip(shape, box_of(shape), strict=True)):
        if length > 1:
            before, count, after = scales.shape[:dim], scales.shape[dim], scales.shape[dim + 1 :]
            wide = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), (*before, count, length, *after))
            wide = wide.reshape(*before, count * length, *after)
            scales = wide[(slice(None),) * dim + (slice(size),)] if count * length != size else wide
    return scales


def _length(size: int, low: int, high: int) -> int:
    """Choose the length of blocks along a dimension of this size, from `low` to `high` if possible.

    Prefer a length for which the number of blocks is a power of two. Then, if the dimension is split over a power of
    two of devices, either no block is cut, or all blocks are cut into equal parts and only their scales are exchanged.
    """
    if size <= low:
        return size
    odd = size // (size & -size)
    halves = (odd << i for i in range(size.bit_length()))
    best = next((length for length in halves if length >= low), size)
    if best <= high and size % best == 0:
        return best
    dividing = (length for length in range(low, high + 1) if size % length == 0)
    return next(dividing, -(-size // -(-size // high)))
