"""Copy the parts of a run that this process writes to the host, and cut them into blocks in model order.

A checkpoint has an array in model order, written as a regular grid of chunks. Devices store the array padded and, in a
pipeline, with its first dimension reshaped into several. Example: an array of 5 rows, stored as [chunks=2, stages=2,
per stage=2, ...] and so padded to 8 rows, on 2 stages. The shard of stage 1 has shape [2, 1, 2, ...] and the logical
rows 2, 3 and 6, 7, of which 6 and 7 are padding. So it becomes a single block, rows 2 to 3.
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
"""(a slice for each dimension of an array, the elements of this part)."""


@dataclass(frozen=True)
class HostBlocks:
    """The part of an array that this process writes to a checkpoint, copied to the host.

    Attributes:
      shape: the logical shape of the array.
      dtype: the dtype of the array.
      chunk: the shape of a chunk of the regular grid in which the array is written; chunks at the end may be smaller.
      view: how the stored array is made from the logical array: by padding, and by reshaping the first dimension.
      shards: (slices of the stored array, elements) of each shard that this process writes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    view: View
    shards: tuple[Block, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield (slices of the logical array, elements) for each chunk that this process writes.

        The elements are a view of a shard, without padding.
        """
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

    Issues no collectives, and computes nothing except the uint32 words of random keys. If an array is replicated, only
    one replica is copied: replica i for the i-th array, modulo the number of replicas. So all devices and processes
    share the work.

    Args:
      arrays: (entry, stored array) of each array of the run.

    Returns:
      {name: blocks} of all arrays that are not empty. On a CPU, blocks may share memory with the arrays.
    """
    chosen = [(entry, words_of(x), number) for number, (entry, x) in enumerate(arrays) if 0 not in entry.shape]
    shards = {entry.path: _shards_to_write(x, number) for entry, x, number in chosen}
    for found in shards.values():
        for shard in found:
            shard.data.copy_to_host_async()
    return {entry.path: _host_blocks(entry, x, shards[entry.path]) for entry, x, _ in chosen}


def _shards_to_write(x: jax.Array, number: int) -> list[Any]:
    """Return this process's shards of one replica of an array: replica `number`, modulo the number of replicas."""
    copies = x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) // x.size
    return [shard for shard in x.addressable_shards if shard.replica_id == number % copies]


def _host_blocks(entry: Entry, x: jax.Array, shards: Sequence[Any]) -> HostBlocks:
    view = entry.placement.view
    logical = view.logical + x.shape[len(view.stored) :]  # with the words of a random key
    chunk = map(min, x.sharding.shard_shape(x.shape)[view.extra_dims :], logical)
    held = tuple((shard.index, np.asarray(shard.data)) for shard in shards)
    return HostBlocks(logical, np.dtype(x.dtype), tuple(chunk), view, held)
