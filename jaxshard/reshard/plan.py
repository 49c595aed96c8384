"""`TransferPlan`: the bytes and the peak memory of a transfer, computed from two layouts before anything is moved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxshard.core.layout_text import human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.text_table import Table
from jaxshard.core.tree import bytes_of
from jaxshard.reshard.blocks import Side, find_blocks
from jaxshard.reshard.programs import dtype_of_new
from jaxshard.reshard.schedule import Schedule, schedule

_LARGEST = 1 << 26
"""Blocks with more bytes are cut, so that the memory for pieces does not grow with the model."""


class Move(NamedTuple):
    """One array of a transfer.

    Attributes:
      path: its name, such as "params/blocks/kernel".
      dtype: the dtype; uint32 for random keys, which move as their words.
      source: how it is stored before.
      target: how it is stored afterwards.
    """

    path: str
    dtype: np.dtype[Any]
    source: Side
    target: Side


class TransferPlan:
    """The bytes and the peak memory of a transfer; made by `js.plan_transfer`, and printed by `print`.

    Every device receives each byte that it lacks once, so that `bytes` is the least that any transfer can move.

    Attributes:
      moves: the arrays.
      limit: the largest number of bytes of a piece, half of the largest block. A block is a box of an array that a
        source shard and a target shard have in common; blocks of more than 64 MiB count as such.
    """

    def __init__(self, moves: Iterable[Move]):
        self.moves = tuple(moves)
        blocks = ((move, block) for move in self.moves for block in find_blocks(move.source, move.target))
        largest = max((math.prod(block.shape) * move.dtype.itemsize for move, block in blocks), default=0)
        self.limit = min(largest, _LARGEST) // 2

    def schedule(self, move: Move) -> Schedule:
        """Return the rounds of an array."""
        return schedule(move.source, move.target, max(1, self.limit // move.dtype.itemsize))

    @cached_property
    def sent(self) -> dict[jax.Device, int]:
        """The bytes that each device sends to others; devices that send nothing are left out."""
        return self._total("sent")

    @cached_property
    def received(self) -> dict[jax.Device, int]:
        """The bytes that each device receives from others; devices that receive nothing are left out."""
        return self._total("received")

    @property
    def bytes(self) -> int:
        """The bytes that all devices receive from others."""
        return sum(self.received.values())

    @cached_property
    def rounds(self) -> int:
        """The number of collective-permutes."""
        return sum(bool(one.pairs) for move in self.moves for batch in self.schedule(move).batches for one in batch)

    @cached_property
    def peak(self) -> dict[jax.Device, int]:
        """The peak of each device in bytes: its source shards, its target shards and the pieces that are moving.

        The pieces have no more bytes than the largest block. Arrays in the host's memory (`js.offload`) are on the
        devices one at a time, and on a CPU floats of 8 and 16 bits are copied one array at a time.
        """
        moving = max((self._moving(move) for move in self.moves), default=0)
        before, after = (self._stored(side) for side in ("source", "target"))
        return {device: before[device] + after[device] + moving for device in sorted(before | after, key=_by_id)}

    def __str__(self) -> str:
        """Return the totals, and for each side the largest figures of its devices."""
        rows = []
        for side in ("source", "target") if self.moves else ():
            mesh, stored = getattr(self.moves[0], side).mesh, self._stored(side)
            figures = (self.sent, self.received, stored, self.peak)
            largest = (max(one.get(device, 0) for device in mesh.devices.flat) for one in figures)
            rows.append((side, f"{mesh.size} devices ({mesh_str(mesh)})", *map(human_bytes, largest)))
        table = Table(rows, "<<>>>>", ("", "at most per device:", "sends", "receives", "stores", "peak"))
        total = f"{human_bytes(self.bytes)} between devices in {self.rounds} rounds"
        return "\n".join([f"{len(self.moves)} arrays, {total}", *table.lines])

    def _total(self, what: str) -> dict[jax.Device, int]:
        total = Counter[jax.Device]()
        for move in self.moves:
            elements: Counter[jax.Device] = getattr(self.schedule(move), what)
            total.update({device: count * move.dtype.itemsize for device, count in elements.items()})
        return dict(sorted(total.items(), key=lambda item: _by_id(item[0])))

    def _stored(self, side: str) -> Counter[jax.Device]:
        """Return the bytes that each device stores on one side, without arrays in the host's memory."""
        total = Counter[jax.Device]()
        for move in self.moves:
            one: Side = getattr(move, side)
            if not one.memory:
                total.update(dict.fromkeys(one.devices, _shard_bytes(move, one)))
        return total

    def _moving(self, move: Move) -> int:
        """Return the bytes of the pieces of a batch, as sent and as received, and of copies of a shard."""
        copied = [side for side in (move.source, move.target) if side.memory]
        copied += [move.target] if dtype_of_new(move.dtype, move.target.mesh) != move.dtype else []
        staged = sum(_shard_bytes(move, side) for side in copied)
        return staged + 2 * self.schedule(move).held * move.dtype.itemsize


def _shard_bytes(move: Move, side: Side) -> int:
    shape: tuple[int, ...] = side.sharding.shard_shape(side.view.stored)
    return bytes_of(shape, move.dtype)


def _by_id(device: jax.Device) -> int:
    return int(device.id)
