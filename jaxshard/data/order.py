"""An order of positions that depends on (seed, epoch) alone and takes no memory: a keyed permutation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def permute(position: np.ndarray, *, size: int, seed: int, epoch: np.ndarray | int) -> np.ndarray:
    """int64 values in [0, size): for a fixed (seed, epoch) a permutation of the positions 0 to size - 1.

    A Feistel network on pairs (left, right) in [a] x [b] with a * b just above `size`; a value outside is put through
    again until it lies inside. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 3, 4.

    >>> sorted(permute(np.arange(7), size=7, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    position = np.asarray(position, np.int64)
    if position.size and not (position.min() >= 0 and position.max() < size):
        raise ValueError(f"permute: positions {position.min()} to {position.max()} are not all in 0 to {size - 1}")
    left_size = math.isqrt(max(size, 1))
    right_size = -(-size // left_size)
    key = _mix(_mix(np.uint64(int(seed) % 2**64)) ^ np.broadcast_to(epoch, position.shape).astype(np.uint64))
    turn_keys = [_mix(key ^ np.uint64(turn)) for turn in range(8)]
    value = position.copy()
    outside = np.ones(position.shape, bool)
    while outside.any():
        left, right = np.divmod(value[outside], right_size)
        for turn in range(0, 8, 2):
            left = (left + _hash(right, turn_keys[turn][outside], left_size)) % left_size
            right = (right + _hash(left, turn_keys[turn + 1][outside], right_size)) % right_size
        value[outside] = left * right_size + right
        outside[outside] = value[outside] >= size
    return value


def _hash(x: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    return (_mix(key ^ x.astype(np.uint64)) % np.uint64(size)).astype(np.int64)


def _mix(x: Any) -> Any:
    """A hash of uint64 values: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
