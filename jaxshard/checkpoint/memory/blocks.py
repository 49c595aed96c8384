"""The blocks of a process: the shards of a run's arrays on its devices, each once, however many devices have it.

A block is a shard of a stored array; all devices that are replicas of each other have the same block. Under `hsdp` over
2 x 4 devices, with a process for every two devices:

    device        0  1   2  3   4  5   6  7        process 0 has the blocks 0 and 1 of a weight; so does process 2,
    process         0      1      2      3         whose devices are its replicas
    block         0  1   2  3   0  1   2  3

The name of a block says which part of which array it is: "float32 params/w[0:64, 0:16]". Blocks of random keys have
their uint32 words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxshard.checkpoint.leaves import Entry
from jaxshard.core.keys import words_of
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import axes_of

Index = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


class Block(NamedTuple):
    """The description of a shard of a stored array, without its bytes.

    Attributes:
      name: the unique name of the block, such as "float32 params/w[0:64, 0:16]".
      array: the index of the array among `Blocks.entries`.
      where: (start, stop) of the shard in each dimension of the stored array.
      size: the number of bytes.
    """

    name: str
    array: int
    where: Index
    size: int


class Blocks:
    """The blocks (shards) of a run with this layout, by device and by process.

    Blocks of other processes are computed only on request, since a pod may have millions of blocks.

    Attributes:
      entries: the names, shapes, dtypes and placements of the arrays of a run.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entry]):
        self.entries, self._devices = tuple(entries), list(layout.mesh.devices.flat)
        self._where = [
            entry.placement.sharding(layout.mesh).devices_indices_map(stored_shape(entry)) for entry in entries
        ]
        self._of_device: dict[jax.Device, tuple[Block, ...]] = {}
        self._of_process: dict[int, dict[str, Block]] = {}

    def of_device(self, device: jax.Device) -> tuple[Block, ...]:
        """Return the blocks of a device: one for each array that is not empty."""
        if device not in self._of_device:
            arrays = enumerate(zip(self.entries, self._where, strict=True))
            found = (_block(number, entry, where[device]) for number, (entry, where) in arrays)
            self._of_device[device] = tuple(block for block in found if block.size)
        return self._of_device[device]

    def devices_of(self, process: int) -> list[jax.Device]:
        """Return the devices of a process, in the order of the mesh."""
        return [device for device in self._devices if device.process_index == process]

    def of_process(self, process: int) -> dict[str, Block]:
        """Return {name: block} of a process. A block that several of its devices store is listed once."""
        if process not in self._of_process:
            blocks = (block for device in self.devices_of(process) for block in self.of_device(device))
            self._of_process[process] = {block.name: block for block in blocks}
        return self._of_process[process]

    @property
    def own(self) -> dict[str, Block]:
        """The blocks of this process, as {name: block}."""
        return self.of_process(jax.process_index())


def _block(number: int, entry: Entry, slices: Sequence[Any]) -> Block:
    index = _plain(slices, stored_shape(entry))
    size = np.dtype(entry.words.dtype).itemsize * math.prod(stop - start for start, stop in index)
    where = ", ".join(f"{start}:{stop}" for start, stop in index)
    return Block(f"{entry.dtype} {entry.path}[{where}]", number, index, size)


def stored_shape(entry: Entry) -> tuple[int, ...]:
    """Return the global shape of an array as the layout stores it; for random keys, the shape of their uint32 words."""
    return entry.placement.view.stored + tuple(entry.words.shape[len(entry.shape) :])


def copy_out(blocks: Blocks, arrays: Sequence[jax.Array]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Copy this process's blocks (shards) to the host; on a CPU, the results share memory with the arrays.

    Args:
      blocks: the blocks of all processes.
      arrays: the stored arrays of a run, in the order of `blocks.entries`.

    Returns:
      The bytes of each block, in the order of `blocks.own`.
    """
    shards: dict[tuple[int, Index], jax.Array] = {}
    for number, x in enumerate(map(words_of, arrays)):
        for shard in x.addressable_shards if x.size else ():
            shards.setdefault((number, _plain(shard.index, x.shape)), shard.data)
    held = [shards[block.array, block.where] for block in blocks.own.values()]
    for data in held:
        data.copy_to_host_async()
    return [np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8) for data in held]


def put_back(layout: Layout, blocks: Blocks, found: dict[str, np.ndarray[Any, Any]]) -> list[jax.Array]:
    """Make the arrays of a run on the devices from the bytes of this process's blocks.

    Args:
      layout: the layout of the run.
      blocks: the blocks of all processes.
      found: {name: bytes} of this process's blocks. Each entry is deleted once it is copied to the devices, to free
        memory.

    Returns:
      The stored arrays; for random keys their uint32 words.
    """
    of_array: list[list[tuple[jax.Device, Block]]] = [[] for _ in blocks.entries]
    for device in blocks.devices_of(jax.process_index()):
        for block in blocks.of_device(device):
            of_array[block.array].append((device, block))
    arrays: list[jax.Array] = []
    for entry, parts in zip(blocks.entries, of_array, strict=True):
        shape, dtype, sharding = stored_shape(entry), np.dtype(entry.words.dtype), entry.placement.sharding(layout.mesh)
        if 0 in shape:
            arrays.append(jnp.zeros(shape, dtype, device=sharding))
            continue
        shards = []
        for device, block in parts:
            part = found[block.name].view(dtype).reshape([stop - start for start, stop in block.where])
            there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)  # the host's, under js.offload
            shards.append(jax.device_put(part, there, may_alias=False))
        arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype))
        jax.block_until_ready(shards)
        for _, block in parts:
            found.pop(block.name, None)
    return arrays


def describe(entry: Entry) -> str:
    """Describe how an array is stored, as text: "float32[64, 48] over ('data', None)"."""
    return f"{entry.dtype}{list(stored_shape(entry))} over {tuple(entry.placement.store)}"


def replica_axes(entry: Entry, layout: Layout) -> tuple[str, ...]:
    """Return the names of the mesh axes with more than one device over which an array is replicated."""
    used = axes_of(entry.placement.store)
    return tuple(axis for axis in layout.mesh.axis_names if axis not in used and axis_size(layout.mesh, axis) > 1)


def _plain(index: Sequence[Any], shape: Sequence[int]) -> Index:
    """Convert the slices of a shard in a global array of this shape to (start, stop) pairs."""
    return tuple((where.start or 0, size if where.stop is None else where.stop) for where, size in zip(index, shape))
