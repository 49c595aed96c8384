"""Send sharded matrices to their owners and back, by one all-to-all, inside `shard_map`.

Every device puts its shards of an owner's matrices, whatever their shapes, into one row of a buffer, which has a row
for each owner. So one all-to-all sends all matrices. For example, four matrices over two devices, each of which holds
half of every matrix:

    device 0   a. b. | c. d.        all-to-all       a. b. | .a .b    ->   aa bb
    device 1   .a .b | .c .d      ------------->     c. d. | .c .d    ->   cc dd

Owners may hold matrices of different shapes, so rows for two owners may hold different shapes (see `Rows`). All rows
are padded to the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Rows(NamedTuple):
    """The layout of the buffer of an all-to-all, [devices, width]: row r holds what this device sends to device r.

    A row holds this device's shards of the matrices that device r owns, one after another:

        row for device 0   w0 w0 w0 w0          device 0 owns a large matrix
        row for device 1   v0 v0 v1 v1          device 1 owns two small matrices

    Attributes:
      firsts: for each stack (matrices of equal shape) and each device, the offset in the device's row at which the
        shards of this stack begin.
      width: the number of elements of a row, the same for all devices.
    """

    firsts: tuple[tuple[int, ...], ...]
    width: int


def lay_rows(kinds: Sequence[tuple[Sequence[int], int, int]]) -> Rows:
    """Lay out the rows of an all-to-all buffer: where the shards of each stack begin in the row for each device.

    `kinds` has for each stack (matrices of equal shape) a tuple: the number of its matrices that each device owns, the
    largest of these numbers, and the number of elements of a shard.
    """
    used, width = [0] * len(kinds[0][0]), 0
    firsts = []
    for counts, slots, size in kinds:
        firsts.append(tuple(used))
        # Every device reads and writes as many places as the largest owner has, even past its own matrices.
        width = max(width, *(first + slots * size for first, count in zip(used, counts, strict=True) if count))
        used = [first + count * size for first, count in zip(used, counts, strict=True)]
    return Rows(tuple(firsts), width)


class Split(NamedTuple):
    """The sharding of the matrices of a stack (matrices of equal shape), and the device that owns each.

    Each device has the same number of slots, one for each matrix that it can own; some devices have empty slots.

    Attributes:
      places: for each matrix, (index of its owner) * `slots` + (index of its slot on the owner).
      owned: the number of matrices that each device owns.
      slots: the number of slots of each device.
      part: the shape of a shard of one matrix.
      counts: the number of shards along each dimension of a matrix.
    """

    places: tuple[int, ...]
    owned: tuple[int, ...]
    slots: int
    part: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements of a shard of one matrix."""
        return math.prod(self.part)

    def units(self, devices: Sequence[int]) -> list[int]:
        """Return the indices of the matrices that these devices own, device by device, in the order of their slots."""
        unit_at = {place: unit for unit, place in enumerate(self.places)}
        return [unit_at[device * self.slots + slot] for device in devices for slot in range(self.owned[device])]

    def parts_to_whole(self, rows: jax.Array) -> jax.Array:
        """Assemble the shards received from all devices, [devices, slots * size], into full matrices [slots, ...].

        A device owns up to `slots` matrices; a shard of one has `size` elements.
        """
        rank = len(self.part)
        x = rows.reshape(*self.counts, self.slots, *self.part)
        # [counts..., slots, part...] -> [slots, count 0, part 0, count 1, part 1, ...], then merge each pair.
        order = [rank, *(axis for dim in range(rank) for axis in (dim, rank + 1 + dim))]
        full_sizes = (count * size for count, size in zip(self.counts, self.part, strict=True))
        return x.transpose(order).reshape(self.slots, *full_sizes)

    def whole_to_parts(self, x: jax.Array) -> jax.Array:
        """Split full matrices [slots, ...] into the shards for all devices, [devices, slots * size].

        A device owns up to `slots` matrices; a shard of one has `size` elements.
        """
        rank = len(self.part)
        sizes = [size for pair in zip(self.counts, self.part, strict=True) for size in pair]
        order = [*(1 + 2 * dim for dim in range(rank)), 0, *(2 + 2 * dim for dim in range(rank))]
        return x.reshape(self.slots, *sizes).transpose(order).reshape(math.prod(self.counts), self.slots * self.size)


def to_owners(units: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Send the shards of every matrix to the device that owns the matrix, by one all-to-all per dtype.

    Call it inside `shard_map`. `from_owners` is the inverse.

    Args:
      units: for each stack (matrices of equal shape) this device's shards of all its matrices, [matrices, ...].
      splits: for each stack how its matrices are sharded, and which device owns each.
      axes: the mesh axes over which the matrices are split.

    Returns:
      For each stack the full matrices that this device owns, [slots, ...]. If it owns fewer than `slots` matrices, the
      content of the last slots is undefined.
    """

    def send(units: Sequence[jax.Array], splits: Sequence[Split], rows: Rows) -> list[jax.Array]:
        moved = _all_to_all(_pack(units, splits, rows), axes)
        return [split.parts_to_whole(_read(moved, split, rows.firsts[n], axes)) for n, split in enumerate(splits)]

    return _by_dtype(units, splits, send)


def from_owners(whole: Sequence[jax.Array], splits: Sequence[Split], axes: Sequence[str]) -> list[jax.Array]:
    """Send full matrices from their owners back to all devices as shards: the inverse of `to_owners`.

    Args:
      whole: for each stack (matrices of equal shape) the full matrices that this device owns, [slots, ...].
      splits: for each stack how its matrices are sharded, and which device owns each.
      axes: the mesh axes over which the matrices are split.

    Returns:
      For each stack this device's shards of all its matrices, [matrices, ...].
    """

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
    """Send row r of `rows` to device r along the mesh axes; return the rows received, one from each device."""
    moved: jax.Array = lax.all_to_all(rows, tuple(axes), split_axis=0, concat_axis=0, tiled=True)
    return moved


def _pack(units: Sequence[jax.Array], splits: Sequence[Split], rows: Rows) -> jax.Array:
    """Copy `units`, this device's shards of all matrices, to a buffer [devices, width]: row r is for the owner r."""
    pieces, order = [], []
    # Devices that own equally many matrices of every stack have rows of one form, which are built together.
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
    """Return this device's shards of a stack's matrices, [matrices, ...], from a received buffer [devices, width].

    Row r of the buffer comes from device r and has shards of the matrices that device r owns. The shards of this stack
    begin at the offset `firsts[r]`.
    """
    pieces, order = [], []
    for devices in _alike(zip(firsts, split.owned, strict=True)):
        if each := split.owned[devices[0]]:
            first = firsts[devices[0]]
            pieces.append(_take(moved, devices)[:, first : first + each * split.size].reshape(-1, *split.part))
            order += split.units(devices)
    return _take(jnp.concatenate(pieces), np.argsort(order).tolist())


def _read(moved: jax.Array, split: Split, firsts: Sequence[int], axes: Sequence[str]) -> jax.Array:
    """Read all devices' shards of the matrices that this device owns, [devices, slots * size], from a received buffer.

    The rows of the buffer come from all devices. In each row the shards of this stack begin at the same offset, this
    device's entry of `firsts`. If the device owns no matrix of the stack, the result is arbitrary.
    """
    width = split.slots * split.size
    found = {first for first, owned in zip(firsts, split.owned, strict=True) if owned}
    if len(found) == 1:
        return lax.slice_in_dim(moved, min(found), min(found) + width, axis=1)
    return lax.dynamic_slice_in_dim(moved, _mine(firsts, axes), width, axis=1)


def _write(blocks: Sequence[jax.Array], splits: Sequence[Split], rows: Rows, axes: Sequence[str]) -> jax.Array:
    """Fill the buffer [devices, width] that sends this device's matrices back: row r has the shards for device r.

    `blocks` has for each stack the shards of the matrices that this device owns, [devices, slots * size].
    """
    if len(blocks) == 1 or all(min(split.owned) == split.slots for split in splits):
        return jnp.concatenate(blocks, axis=1)
    # In stack order: the empty slots of a stack may reach into the columns of the next, which then overwrites them. A
    # device that owns nothing of a stack must not overwrite anything, hence `where`.
    row = jnp.zeros((blocks[0].shape[0], rows.width), blocks[0].dtype)
    for block, split, firsts in zip(blocks, splits, rows.firsts, strict=True):
        first = _mine(firsts, axes)
        old = lax.dynamic_slice_in_dim(row, first, block.shape[1], axis=1)
        row = lax.dynamic_update_slice_in_dim(row, jnp.where(_mine(split.owned, axes) > 0, block, old), first, axis=1)
    return row


def _mine(numbers: Sequence[int], axes: Sequence[str]) -> jax.Array:
    """Return the entry for this device from a list with one integer per device."""
    return jnp.asarray(np.asarray(numbers, np.int32))[lax.axis_index(tuple(axes))]


def _alike(forms: Sequence[tuple[int, ...]] | zip[tuple[int, ...]]) -> list[list[int]]:
    """Group the devices (0, 1, ...) with equal tuples in `forms`, which has one tuple per device: [[0, 2], [1]]."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device, form in enumerate(forms):
        found.setdefault(form, []).append(device)
    return list(found.values())


def _take(x: jax.Array, numbers: list[int]) -> jax.Array:
    """Return the rows of an array with these indices: by a slice if they are consecutive, else by a gather."""
    first, count = numbers[0], len(numbers)
    if numbers == list(range(first, first + count)):
        return x if count == x.shape[0] else lax.slice_in_dim(x, first, first + count)
    return jnp.take(x, np.asarray(numbers, np.int32), axis=0, mode="clip")
