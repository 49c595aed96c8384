"""Zigzag order: split a sequence over devices so that all devices have the same work in causal attention.

The sequence is split into 2n chunks, and device i of n has the chunks i and 2n - 1 - i:

    n = 4, chunks of the sequence    0 1 2 3 4 5 6 7
    device                           0 1 2 3 3 2 1 0

A query sees the keys before it, so chunk j of queries sees about j chunks of keys. The two chunks of a device together
see i + (2n - 1 - i) = 2n - 1 chunks, the same number on every device. Source: Zhu 2024, "ring-flash-attention"
(zigzag); Brandon et al. 2023, "Striped Attention", for another order.

Functions with `axes` run inside `shard_map`, over the n devices along these mesh axes, counted in row-major order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

Axes = tuple[str, ...]
"""Names of mesh axes."""


def chunk_starts(i: Any, n: int, length: int) -> jax.Array:
    """Return the positions in the full sequence at which device i's two chunks begin, int32[2].

    Device i of n has the chunks i and 2n - 1 - i of 2n equal chunks. `length` is the size of both together.
    """
    return jnp.stack([jnp.asarray(i), jnp.asarray(2 * n - 1 - i)]).astype(jnp.int32) * (length // 2)


def to_zigzag(x: Shaped[Array, "*dims"], n: int, dim: int) -> Shaped[Array, "*dims"]:
    """Reorder dimension `dim` from the order of the sequence to zigzag order: the chunks 0, 2n-1, 1, 2n-2, ...

    Splitting the result into n equal parts gives device i the chunks i and 2n-1-i.
    """
    chunks = x.reshape(*x.shape[:dim], 2, n, -1, *x.shape[dim + 1 :])
    low, high = (jnp.take(chunks, half, dim) for half in range(2))
    return jnp.stack([low, jnp.flip(high, dim)], dim + 1).reshape(x.shape)


def from_zigzag(x: Shaped[Array, "*dims"], n: int, dim: int) -> Shaped[Array, "*dims"]:
    """Reorder dimension `dim` from zigzag order over n devices to sequence order: the inverse of `to_zigzag`."""
    chunks = x.reshape(*x.shape[:dim], n, 2, -1, *x.shape[dim + 1 :])
    low, high = (jnp.take(chunks, half, dim + 1) for half in range(2))
    return jnp.concatenate([low, jnp.flip(high, dim)], dim).reshape(x.shape)


def exchange_to_zigzag(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Exchange chunks between n devices: device i sends the chunks 2i and 2i + 1, and gets i and 2n - 1 - i.

    Collectives: two permutes of half of `x`, one of all even chunks and one of all odd chunks.

    Args:
      x: the two chunks of this device.
      axes: the mesh axes over which the sequence is split.
      dim: the dimension of the sequence.
    """
    n = lax.axis_size(axes)
    halves = jnp.split(x, 2, axis=dim)
    even, odd = (lax.ppermute(half, axes, _moves(n, slot)) for slot, half in enumerate(halves))
    is_even = lax.axis_index(axes) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], dim)


def exchange_from_zigzag(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Undo `exchange_to_zigzag`, by two permutes, each of half of `x`."""
    n = lax.axis_size(axes)
    low, high = jnp.split(x, 2, axis=dim)
    is_even = lax.axis_index(axes) % 2 == 0
    even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    halves = (
        lax.ppermute(half, axes, [(to, source) for source, to in _moves(n, slot)])
        for slot, half in enumerate((even, odd))
    )
    return jnp.concatenate(list(halves), dim)


def _moves(n: int, slot: int) -> list[tuple[int, int]]:
    """Return for each device i of n the pair (i, the device that has chunk 2i + slot in zigzag order).

    The pairs are an argument of `lax.ppermute`; `slot` is 0 for the even chunks and 1 for the odd chunks.
    """
    chunks = [2 * i + slot for i in range(n)]
    return [(i, min(chunk, 2 * n - 1 - chunk)) for i, chunk in enumerate(chunks)]
