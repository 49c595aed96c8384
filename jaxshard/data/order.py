"""Shuffle by a keyed permutation, which depends only on (seed, epoch) and takes no memory.

A stored permutation of a billion windows takes 8 GB, and every epoch needs a new one. This permutation computes the
image of each position directly, like a block cipher.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Int

_ROUNDS = 8
"""Rounds of the Feistel network: four suffice with ideal hashes (Luby and Rackoff 1988), eight leave a margin."""


def permute(
    position: Int[np.ndarray, "*shape"], *, size: int, seed: int, epoch: Int[np.ndarray, "*shape"] | int
) -> Int[np.ndarray, "*shape"]:
    """Shuffle the integers from 0 to size - 1: return where a pseudorandom permutation moves each given integer.

    The permutation depends on (seed, epoch). It is a Feistel network on pairs (left, right) in [a] x [b], with a * b
    just above `size`, which permutes a * b values. The network is applied again to results of `size` or more until they
    are smaller (cycle walking), which gives a permutation of `size` values. Source: Black and Rogaway 2002, "Ciphers
    with Arbitrary Finite Domains", sections 3 (cycle walking) and 4 (the network).

    Args:
      position: integers from 0 to size - 1, of any shape.
      size: the number of integers that are permuted, below 2**62.
      seed: any integer; taken modulo 2**64.
      epoch: an integer from 0, or one per position. Each epoch has a different order.

    Returns:
      The image of each position under the permutation: int64, of the shape of `position`.

    Raises:
      ValueError: a position that is not in 0 to size - 1.

    Example:
      >>> sorted(permute(np.arange(7), size=7, seed=0, epoch=3).tolist())
      [0, 1, 2, 3, 4, 5, 6]
    """
    position = np.asarray(position, np.int64)
    if position.size and not (position.min() >= 0 and position.max() < size):
        raise ValueError(f"permute: positions {position.min()} to {position.max()} are not all in 0 to {size - 1}")
    # Two nearly equal factors, whose product is `size` or slightly more.
    left_size = math.isqrt(max(size, 1))
    right_size = -(-size // left_size)
    key = _mix(_mix(np.uint64(int(seed) % 2**64)) ^ np.broadcast_to(epoch, position.shape).astype(np.uint64))
    round_keys = [_mix(key ^ np.uint64(number)) for number in range(_ROUNDS)]
    value = position.copy()
    # a * b exceeds `size` by less than sqrt(size), so nearly all values are inside after one pass.
    outside = np.ones(position.shape, bool)
    while outside.any():
        left, right = np.divmod(value[outside], right_size)
        for number in range(0, _ROUNDS, 2):
            left = (left + _hash(right, round_keys[number][outside], left_size)) % left_size
            right = (right + _hash(left, round_keys[number + 1][outside], right_size)) % right_size
        value[outside] = left * right_size + right
        outside[outside] = value[outside] >= size
    return value


def _hash(x: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    mixed: np.ndarray = _mix(key ^ x.astype(np.uint64)) % np.uint64(size)
    return mixed.astype(np.int64)


def _mix(x: Any) -> Any:
    """Hash uint64 values as the random generator SplitMix64 does for its output (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
