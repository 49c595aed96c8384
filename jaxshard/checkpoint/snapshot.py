"""A run on the host as it is now: of every array the pieces that this process has to write, in model order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxshard.checkpoint.leaves import Entry
from jaxshard.core.placement import View

Block = tuple[tuple[slice, ...], np.ndarray[Any, Any]]
"""Where it lies in an array, and what lies there."""


@dataclass(frozen=True)
class Pieces:
    """What one process writes of an array: blocks of a regular grid of `chunk`s, those at the end may be smaller.

    `shards` are stored as `view` says, each with its place; they are cut into blocks when these are asked for.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    view: View
    shards: tuple[Block, ...]

    def blocks(self) -> Iterator[Block]:
        """All blocks, in model order and without padding: views of the shards."""
        for index, shard in self.shards:
            yield from self._blocks_of(index, shard)

    def _blocks_of(self, index: tuple[slice, ...], shard: np.ndarray[Any, Any]) -> Iterator[Block]:
        """One block for each index of the dimensions that came with the cut."""
        cut, stored = self.view.cut, self.view.stored
        starts = [where.start or 0 for where in index]
        for lead in np.ndindex(shard.shape[:cut]):
            first = 0
            for start, i, size in zip(starts, (*lead, 0), stored[: cut + 1]):
                first = first * size + start + i
            begins = (first, *starts[cut + 1 :]) if shard.ndim else ()
            sizes = [min(size, end - begin) for size, end, begin in zip(shard.shape[cut:], self.shape, begins)]
            if all(size > 0 for size in sizes):
                where = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes))
                yield where, shard[(*lead, *map(slice, sizes), ...)]


def snapshot(arrays: Sequence[tuple[Entry, jax.Array]]) -> dict[str, Pieces]:
    """The pieces of all arrays that are not empty, by their paths; the arrays may be donated afterwards.

    Nothing is sent between devices, nor computed but the words of random keys: a shard of a pipeline is several blocks.
    Of an array that lies on several devices one copy is taken, of each array another, so that they share the work.
    """
    chosen = [(entry, _words(entry, x), number) for number, (entry, x) in enumerate(arrays) if not entry.is_empty]
    shards = {entry.path: _shards_to_write(x, number) for entry, x, number in chosen}
    for found in shards.values():
        for shard in found:
            shard.data.copy_to_host_async()
    return {entry.path: _pieces(entry, x, shards[entry.path]) for entry, x, _ in chosen}


def _words(entry: Entry, x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if entry.is_key else x


def _shards_to_write(x: jax.Array, number: int) -> list[Any]:
    copies = x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) // x.size
    return [shard for shard in x.addressable_shards if shard.replica_id == number % copies]


def _pieces(entry: Entry, x: jax.Array, shards: Sequence[Any]) -> Pieces:
    view = entry.placement.view
    logical = view.logical + x.shape[len(view.stored) :]  # with the words of a random key
    chunk = map(min, x.sharding.shard_shape(x.shape)[view.cut :], logical)
    held = tuple((shard.index, np.asarray(shard.data)) for shard in shards)
    return Pieces(logical, np.dtype(x.dtype), tuple(chunk), view, held)
