"""Matrices on their way: from parts that all devices hold to their owners, and back; inside `shard_map`.

What every device sends to an owner are its parts of that owner's matrices, whatever their shapes, in one row. So one
all-to-all moves all matrices. Of four over two devices, each of which holds half of every matrix:

    device 0   a. b. | c. d.        all-to-all       a. b. | .a .b    ->   aa bb
    device 1   .a .b | .c .d      ------------->     c. d. | .c .d    ->   cc dd

Owners may have matrices of different kinds, so that each row has a form of its own (`core/owners.Rows`); all are as
long as the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxshard.core.owners import Rows, lay_rows


class Split(NamedTuple):
    """The parts into which the matrices of a stack are cut, and the places of the matrices.

    Attributes:
      places: of each matrix: the number of its owner times `slots`, plus the slot there.
      owned: how many matrices each device owns.
      slots: the places on each device.
      part: the shape of one device's part of a matrix.
      counts: into how many parts each dimension is cut.
    """

    places: tuple[int, ...]
    owned: tuple[int, ...]
    slots: int
    part: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The elements of one part."""
        return math.prod(self.part)

    def units(self, devices: Sequence[int]) -> list[int]:
        """The numbers of the matrices of some devices, in the order of their places."""
        unit_at = {place: unit for unit, place in enumerate(self.places)}
        return [unit_at[device * self.slots + slot] for device in devices for slot in range(self.owned[device])]

    def parts_to_whole(self, rows: jax.Array) -> jax.Array:
        """Put the rows of all devices [devices, slots * size] together as whole matrices [slots, ...]."""
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
        return x.reshape(self.slots, *sizes).transpose(order).reshape(math.prod(self.counts), self.slots * self.size)


def to_owners(units: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Bring matrices to their owners.

    Args:
      units: for each stack [matrices, ...], of each matrix this device's part.
      splits: how each is split, and who owns what.
      axes: the mesh axes over which they are.

    Returns:
      For each stack [places of this device, ...], whole matrices; in empty places anything. One all-to-all for each
      dtype among them.
    """

    def send(units: Sequence[jax.Array], splits: Sequence[Split], rows: Rows) -> list[jax.Array]:
        moved = _all_to_all(_pack(units, splits, rows), axes)
        return [split.parts_to_whole(_read(moved, split, rows.firsts[n], axes)) for n, split in enumerate(splits)]

    return _by_dtype(units, splits, send)


def from_owners(whole: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Bring whole matrices back to their parts: the inverse of `to_owners`."""

    def send(whole: Sequence[jax.Array], splits: Sequence[Split], rows: Rows) -> list[jax.Array]:
        blocks = [split.whole_to_parts(x) for x, split in zip(whole, splits, strict=True)]
        moved = _all_to_all(_write(blocks, splits, rows, axes), axes)
        return [_unpack(moved, split, rows.firsts[n]) for n, split in enumerate(splits)]

    return _by_dtype(whole, splits, send)


_Send = Callable[[Sequence[jax.Array], Sequence[Split], Rows], list[jax.Array]]


def _by_dtype(arrays: Sequence[jax.Array], splits: Sequence[Split], send: _Send) -> list[jax.Array]:
    sent = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        numbers = [number for number, x in enumerate(arrays) if x.dtype == dtype]
        some = [splits[number] for number in numbers]
        rows = lay_rows([(split.owned, split.slots, split.size) for split in some])
        for number, x in zip(numbers, send([arrays[number] for number in numbers], some, rows), strict=True):
            sent[number] = x
    return sent


def _all_to_all(rows: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Send row r to device r."""
    moved: jax.Array = lax.all_to_all(rows, tuple(axes), split_axis=0, concat_axis=0, tiled=True)
    return moved


def _pack(units: Sequence[jax.Array], splits: Sequence[Split], rows: Rows) -> jax.Array:
    """Put this device's parts of all matrices [matrices, ...] in the rows of their owners [devices, width]."""
    pieces, order = [], []
    for devices in _alike(zip(*(split.owned for split in splits), strict=True)):
        parts = [jnp.zeros((len(devices), 0), units[0].dtype)]
        for x, split in zip(units, splits, strict=True):
            if each := split.owned[devices[0]]:
                parts.append(_take(x, split.units(devices)).reshape(len(devices), each * split.size))
        row = jnp.concatenate(parts, axis=1) if len(parts) > 2 else parts[-1]
        pieces.append(jnp.pad(row, ((0, 0), (0, rows.width - row.shape[1]))))
        order += devices
    return _take(jnp.concatenate(pieces), np.argsort(order).tolist())


def _unpack(moved: jax.Array, split: Split, firsts: Sequence[int]) -> jax.Array:
    """Take the parts of a stack's matrices [matrices, ...] out of the rows of their owners [devices, width]."""
    pieces, order = [], []
    for devices in _alike(zip(firsts, split.owned, strict=True)):
        if each := split.owned[devices[0]]:
            first = firsts[devices[0]]
            pieces.append(_take(moved, devices)[:, first : first + each * split.size].reshape(-1, *split.part))
            order += split.units(devices)
    return _take(jnp.concatenate(pieces), np.argsort(order).tolist())


def _read(moved: jax.Array, split: Split, firsts: Sequence[int], axes: Sequence[str]) -> jax.Array:
    """Read the columns of this device's matrices of a stack; of a device without any, others."""
    wide = split.slots * split.size
    found = {first for first, owned in zip(firsts, split.owned, strict=True) if owned}
    if len(found) == 1:
        return lax.slice_in_dim(moved, min(found), min(found) + wide, axis=1)
    return lax.dynamic_slice_in_dim(moved, _mine(firsts, axes), wide, axis=1)


def _write(blocks: Sequence[jax.Array], splits: Sequence[Split], rows: Rows, axes: Sequence[str]) -> jax.Array:
    """Put this device's matrices of all stacks in its row, one after the other: what a later one needs comes last."""
    if len(blocks) == 1 or all(min(split.owned) == split.slots for split in splits):
        return jnp.concatenate(blocks, axis=1)
    row = jnp.zeros((blocks[0].shape[0], rows.width), blocks[0].dtype)
    for block, split, firsts in zip(blocks, splits, rows.firsts, strict=True):
        first = _mine(firsts, axes)
        old = lax.dynamic_slice_in_dim(row, first, block.shape[1], axis=1)
        row = lax.dynamic_update_slice_in_dim(row, jnp.where(_mine(split.owned, axes) > 0, block, old), first, axis=1)
    return row


def _mine(numbers: Sequence[int], axes: Sequence[str]) -> jax.Array:
    """Look up this device's number."""
    return jnp.asarray(np.asarray(numbers, np.int32))[lax.axis_index(tuple(axes))]


def _alike(forms: Sequence[tuple[int, ...]] | zip[tuple[int, ...]]) -> list[list[int]]:
    """Put the numbers of devices together whose forms are equal."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device, form in enumerate(forms):
        found.setdefault(form, []).append(device)
    return list(found.values())


def _take(x: jax.Array, numbers: list[int]) -> jax.Array:
    """Take some rows; neighbours in their order without moving them."""
    first, count = numbers[0], len(numbers)
    if numbers == list(range(first, first + count)):
        return x if count == x.shape[0] else lax.slice_in_dim(x, first, first + count)
    return jnp.take(x, np.asarray(numbers, np.int32), axis=0, mode="clip")
