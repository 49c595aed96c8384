"""Copy a run to the host: the blocks of every array that this process writes, in model order.

A checkpoint holds an array in logical order, as a regular grid of chunks; devices hold it as stored, padded and, in a
pipeline, with its first dimension split. Example: 5 blocks of a model, stored as [chunks=2, stages=2, per stage=2, ...]
and so padded to 8, on 2 stages. The shard of stage 1 has shape [2, 1, 2, ...] and holds the logical rows 2, 3 and 6, 7;
of these 6 and 7 are padding. So it becomes one block, rows 2 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxshard.checkpoint.leaves import Entry
from jaxshard.core.keys import words_of
from jaxshard.core.placement import View

Block = tuple[tuple[slice, ...], np.ndarray[Any, Any]]
"""(index ranges in an array, the elements there)."""


@dataclass(frozen=True)
class HostBlocks:
    """The part of an array that one process writes, on the host.

    Attributes:
      shape: the logical shape of the array.
      dtype: its dtype.
      chunk: the shape of a chunk of the regular grid in which it is written; chunks at the end may be smaller.
      view: the view of the stored array.
      shards: this process's stored shards, each with its index ranges in the stored array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    view: View
    shards: tuple[Block, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks, each a chunk of the grid without padding. They are views of the shards."""
        cut, stored = self.view.extra_dims, self.view.stored
        for index, shard in self.shards:
            starts = [where.start or 0 for where in index]
            for lead in np.ndindex(shard.shape[:cut]):  # of the dimensions that the first one is split into
                # The logical row of stored index (i, j, k): as in row-major order of those dimensions.
                first = 0
                for start, i, size in zip(starts, (*lead, 0), stored[: cut + 1]):
                    first = first * size + start + i
                begins = (first, *starts[cut + 1 :]) if shard.ndim else ()
                sizes = [min(size, end - begin) for size, end, begin in zip(shard.shape[cut:], self.shape, begins)]
                if all(size > 0 for size in sizes):
                    where = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes))
                    yield where, shard[(*lead, *map(slice, sizes), ...)]


def snapshot(arrays: Sequence[tuple[Entry, jax.Array]]) -> dict[str, HostBlocks]:
    """Copy the parts of a run that this process writes to the host; the arrays may be donated afterwards.

    Issues no collectives, and computes only the words of random keys. For an array with replicas one replica is copied,
    another one for each array, so that all devices and processes share the work.

    Args:
      arrays: the arrays of the run as stored, with their entries.

    Returns:
      The blocks of all arrays that are not empty, by name. A CPU's blocks may share memory with its arrays.
    """
    chosen = [(entry, words_of(x), number) for number, (entry, x) in enumerate(arrays) if 0 not in entry.shape]
    shards = {entry.path: _shards_to_write(x, number) for entry, x, number in chosen}
    for found in shards.values():
        for shard in found:
            shard.data.copy_to_host_async()
    return {entry.path: _host_blocks(entry, x, shards[entry.path]) for entry, x, _ in chosen}


def _shards_to_write(x: jax.Array, number: int) -> list[Any]:
    """Return this process's shards of one replica of an array: index `number` modulo the number of replicas."""
    copies = x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) // x.size
    return [shard for shard in x.addressable_shards if shard.replica_id == number % copies]


def _host_blocks(entry: Entry, x: jax.Array, shards: Sequence[Any]) -> HostBlocks:
    view = entry.placement.view
    logical = view.logical + x.shape[len(view.stored) :]  # with the words of a random key
    chunk = map(min, x.sharding.shard_shape(x.shape)[view.extra_dims :], logical)
    held = tuple((shard.index, np.asarray(shard.data)) for shard in shards)
    return HostBlocks(logical, np.dtype(x.dtype), tuple(chunk), view, held)
