"""Matrices on their way: from parts that all devices hold to their owners, and back; inside `shard_map`.

What every device sends to an owner are its parts of that owner's matrices, whatever their shapes, in one row. So one
all-to-all moves all matrices. Of four over two devices, each of which holds half of every matrix:

    device 0   a. b. | c. d.        all-to-all       a. b. | .a .b    ->   aa bb
    device 1   .a .b | .c .d      ------------->     c. d. | .c .d    ->   cc dd
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Split(NamedTuple):
    """The parts into which the matrices of a stack are cut.

    Attributes:
      slots: the places on each device.
      part: the shape of one device's part of a matrix.
      counts: into how many parts each dimension is cut.
    """

    slots: int
    part: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def row(self) -> int:
        """The elements that one device sends to one owner."""
        return self.slots * math.prod(self.part)

    def parts_to_whole(self, rows: jax.Array) -> jax.Array:
        """Put the rows of all devices [devices, row] together as whole matrices [slots, ...]."""
        rank = len(self.part)
        x = rows.reshape(*self.counts, self.slots, *self.part)
        order = [rank, *(axis for dim in range(rank) for axis in (dim, rank + 1 + dim))]
        whole = (count * size for count, size in zip(self.counts, self.part, strict=True))
        return x.transpose(order).reshape(self.slots, *whole)

    def whole_to_parts(self, x: jax.Array) -> jax.Array:
        """Cut whole matrices [slots, ...] into rows for all devices: the inverse of `parts_to_whole`."""
        rank = len(self.part)
        sizes = [size for pair in zip(self.counts, self.part, strict=True) for size in pair]
        order = [*(1 + 2 * dim for dim in range(rank)), 0, *(2 + 2 * dim for dim in range(rank))]
        return x.reshape(self.slots, *sizes).transpose(order).reshape(math.prod(self.counts), self.row)


def to_owners(stacks: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Bring matrices to their owners.

    Args:
      stacks: for each stack [places of all devices, ...], of each matrix this device's part.
      splits: how each is split.
      axes: the mesh axes over which they are.

    Returns:
      For each stack [places of this device, ...], whole matrices. One all-to-all for each dtype among them.
    """
    rows = [x.reshape(-1, split.row) for x, split in zip(stacks, splits, strict=True)]
    return [split.parts_to_whole(x) for x, split in zip(_exchange(rows, axes), splits, strict=True)]


def from_owners(whole: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Bring whole matrices back to their parts: the inverse of `to_owners`."""
    rows = [split.whole_to_parts(x) for x, split in zip(whole, splits, strict=True)]
    return [x.reshape(-1, *split.part) for x, split in zip(_exchange(rows, axes), splits, strict=True)]


def _exchange(rows: Sequence[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
    """Send row r of every array to device r; one all-to-all for each dtype."""
    exchanged = list(rows)
    for dtype in dict.fromkeys(x.dtype for x in rows):
        numbers = [number for number, x in enumerate(rows) if x.dtype == dtype]
        together = jnp.concatenate([rows[number] for number in numbers], axis=1)
        moved = lax.all_to_all(together, tuple(axes), split_axis=0, concat_axis=0, tiled=True)
        first = 0
        for number in numbers:
            size = rows[number].shape[1]
            exchanged[number] = moved[:, first : first + size]
            first += size
    return exchanged
