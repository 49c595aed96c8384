"""Order the pieces of a transfer in rounds: in a round, a device sends at most one piece and receives at most one.

All pieces of a round have the same shape, so a round is one collective-permute without padding. Pieces that a device
already has take part in rounds of their own, in which nothing is sent. Consecutive rounds make a batch: the pieces of
a batch are in memory at the same time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.reshard.blocks import Index, Side, find_blocks, split_block


class Piece(NamedTuple):
    """A box of an array with the device that sends it and the device that receives it, which may be the same."""

    shape: Index
    source: jax.Device
    source_at: Index
    target: jax.Device
    target_at: Index


class Round(NamedTuple):
    """Pieces of one shape that move at the same time.

    Attributes:
      shape: the shape of each piece.
      pairs: (sender, receiver) as positions among `union_devices`; () if no piece leaves its device.
      source_at: int32[source devices, stored dimensions], where each device cuts its piece.
      target_at: int32[target devices, stored dimensions], where each device inserts its piece.
      receives: bool[target devices], True where a device gets a piece.
    """

    shape: Index
    pairs: tuple[tuple[int, int], ...]
    source_at: np.ndarray
    target_at: np.ndarray
    receives: np.ndarray


class Schedule(NamedTuple):
    """All rounds of an array.

    Attributes:
      batches: the rounds, in groups whose pieces are in memory together.
      sent: the number of elements that each device sends to others.
      received: the number of elements that each device receives from others.
      held: the largest number of elements of the pieces of a batch, on one device.
    """

    batches: tuple[tuple[Round, ...], ...]
    sent: Counter[jax.Device]
    received: Counter[jax.Device]
    held: int


def union_devices(source: Mesh, target: Mesh) -> tuple[jax.Device, ...]:
    """Return the devices of both meshes, each once, in the order of their ids."""
    return tuple(sorted({*source.devices.flat, *target.devices.flat}, key=lambda device: device.id))


@lru_cache(maxsize=1024)
def schedule(source: Side, target: Side, elements: int) -> Schedule:
    """Schedule the transfer of an array.

    Args:
      source: how the array is stored before.
      target: how it is stored afterwards.
      elements: the largest number of elements of a piece, and of the pieces of a batch together.
    """
    pieces = _choose_senders(source, target, elements)
    of_shape: dict[tuple[Index, bool], list[Piece]] = defaultdict(list)
    for piece in pieces:
        of_shape[piece.shape, piece.source == piece.target].append(piece)
    devices = union_devices(source.mesh, target.mesh)
    positions = {device: position for position, device in enumerate(devices)}
    rounds = [
        _tabulate(group, source, target, positions)
        for alike in of_shape.values()
        for group in _without_collisions(alike, positions)
    ]
    moved = [piece for piece in pieces if piece.source != piece.target]
    sent, received = Counter[jax.Device](), Counter[jax.Device]()
    for piece in moved:
        sent[piece.source] += math.prod(piece.shape)
        received[piece.target] += math.prod(piece.shape)
    batches = tuple(_batches(rounds, elements))
    held = max((sum(math.prod(one.shape) for one in batch) for batch in batches), default=0)
    return Schedule(batches, sent, received, held)


def _choose_senders(source: Side, target: Side, elements: int) -> list[Piece]:
    """Choose for each piece and each device that needs it a sender.

    The device itself if it has the piece; otherwise a device of the same process if possible, with the least to send.
    """
    sent, pieces = Counter[jax.Device](), []
    for block in find_blocks(source, target):
        for part in split_block(block, elements):
            for taker in part.takers:

                def cost(holder: jax.Device, taker: jax.Device = taker) -> tuple[bool, bool, int]:
                    return holder != taker, holder.process_index != taker.process_index, sent[holder]

                sender = min(part.holders, key=cost)
                sent[sender] += 0 if sender == taker else math.prod(part.shape)
                pieces.append(Piece(part.shape, sender, part.source_at, taker, part.target_at))
    return pieces


def _without_collisions(pieces: Sequence[Piece], positions: dict[jax.Device, int]) -> Iterable[list[Piece]]:
    """Group pieces so that no device sends two pieces of a group, or receives two.

    Pieces that travel equally far around the ring of devices come one after another, for they never collide.
    """

    def distance(piece: Piece) -> int:
        return (positions[piece.target] - positions[piece.source]) % len(positions)

    rounds: dict[int, list[Piece]] = defaultdict(list)
    sends, receives = defaultdict[jax.Device, set[int]](set), defaultdict[jax.Device, set[int]](set)
    for piece in sorted(pieces, key=distance):
        taken = sends[piece.source] | receives[piece.target]
        free = next(number for number in itertools.count() if number not in taken)
        sends[piece.source].add(free)
        receives[piece.target].add(free)
        rounds[free].append(piece)
    return rounds.values()


def _tabulate(pieces: list[Piece], source: Side, target: Side, positions: dict[jax.Device, int]) -> Round:
    source_at = np.zeros((len(source.devices), len(source.view.stored)), np.int32)
    target_at = np.zeros((len(target.devices), len(target.view.stored)), np.int32)
    receives = np.zeros(len(target.devices), bool)
    senders, receivers = ({device: n for n, device in enumerate(side.devices)} for side in (source, target))
    for piece in pieces:
        source_at[senders[piece.source]] = piece.source_at
        target_at[receivers[piece.target]] = piece.target_at
        receives[receivers[piece.target]] = True
    pairs = sorted((positions[one.source], positions[one.target]) for one in pieces if one.source != one.target)
    return Round(pieces[0].shape, tuple(pairs), source_at, target_at, receives)


def _batches(rounds: Iterable[Round], elements: int) -> Iterable[tuple[Round, ...]]:
    """Group consecutive rounds whose pieces have at most `elements` elements together."""
    batch: list[Round] = []
    total = 0
    for one in rounds:
        size = math.prod(one.shape)
        if batch and total + size > elements:
            yield tuple(batch)
            batch, total = [], 0
        batch.append(one)
        total += size
    if batch:
        yield tuple(batch)
