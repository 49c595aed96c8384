"""Copy blocks that a process lacks from processes whose devices are replicas, by an all-reduce.

All devices along an axis over which an array is replicated need the same block of it. A device whose process has the
block contributes its bytes, all other devices zeros, so that the sum over the axis is the block, bit for bit:

    replica 0   has the block        2a 07 ff ..
    replica 1   its memory is gone   00 00 00 ..        sum: 2a 07 ff .. on both

Collectives: an all-reduce for every 64 MiB per device of the arrays with missing blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.checkpoint.memory.agreement import POINT, Recalled
from jaxshard.checkpoint.memory.blocks import Block, Blocks, replica_axes
from jaxshard.checkpoint.memory.segment import Bytes
from jaxshard.core.layout import Layout
from jaxshard.distributed.agree import peers_of

_CHUNK = 1 << 26
"""The largest number of bytes per device in an all-reduce."""
_WORD = 4


def fetch(layout: Layout, blocks: Blocks, recalled: Recalled) -> None:
    """Copy the blocks that this process lacks from other processes, and add them to `recalled.found`.

    Collective: every process calls this, even if it lacks no block.
    """
    by_process = [blocks.of_process(process) if names else {} for process, names in enumerate(recalled.missing)]
    numbers = {held[name].array for held, names in zip(by_process, recalled.missing, strict=True) for name in names}
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(numbers):
        groups.setdefault(replica_axes(blocks.entries[number], layout), []).append(number)
    if blocks.devices_of(jax.process_index()):
        for axes in sorted(groups):
            _fetch_group(layout, blocks, recalled, axes, groups[axes])


def _fetch_group(
    layout: Layout, blocks: Blocks, recalled: Recalled, axes: tuple[str, ...], numbers: Sequence[int]
) -> None:
    """Fetch the missing blocks of some arrays, in chunks of at most 64 MiB, and add them to `recalled.found`.

    Args:
      layout: the layout of the run.
      blocks: the blocks of all processes.
      recalled: the step; each missing block is sent by the process in `recalled.holders`.
      axes: the mesh axes over which all these arrays are replicated.
      numbers: the indices of the arrays in `blocks.entries`.
    """
    found, lacking = recalled.found, recalled.missing[jax.process_index()]
    mine = blocks.devices_of(jax.process_index())
    placed = {device: _place(blocks.of_device(device), numbers) for device in mine}
    total = sum(_round_up(block.size) for block, _ in placed[mine[0]])
    chunk = min(total, _CHUNK)
    add = _Sum(layout, axes, chunk // _WORD)
    senders: dict[str, jax.Device] = {}
    for device, held in placed.items():
        for block, _ in held:
            if block.name in lacking:
                found[block.name] = np.empty(block.size, np.uint8)
            elif recalled.holders.get(block.name) == jax.process_index():
                senders.setdefault(block.name, device)
    for start in range(0, total, chunk):
        parts = [np.zeros(chunk, np.uint8) for _ in mine]
        for device, part in zip(mine, parts, strict=True):
            for block, at in placed[device]:
                if senders.get(block.name) is device:
                    here, there = _overlap(start, chunk, at, block.size)
                    part[here] = found[block.name][there]
        for device, part in zip(mine, add(mine, parts), strict=True):
            for block, at in placed[device]:
                if block.name in lacking:
                    here, there = _overlap(start, chunk, at, block.size)
                    found[block.name][there] = part[here]


class _Sum:
    """A compiled all-reduce of uint32 words over some axes of a mesh."""

    def __init__(self, layout: Layout, axes: tuple[str, ...], words: int):
        mesh = layout.mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size * words,)
        add = jax.shard_map(
            partial(jax.lax.psum, axis_name=axes),
            mesh=mesh,
            in_specs=self._sharding.spec,
            out_specs=self._sharding.spec,
            check_vma=False,
        )
        of = jax.ShapeDtypeStruct(self._shape, np.uint32, sharding=self._sharding)
        self._program = jax.jit(add).lower(of).compile()
        self._peers = peers_of(mesh)

    def __call__(self, devices: Sequence[jax.Device], parts: Sequence[Bytes]) -> list[Bytes]:
        """All-reduce one buffer of bytes per device; return the sum for each of this process's devices.

        `parts` has the buffers of `devices`, in order. Each four bytes are added as a uint32.
        """
        words = [jax.device_put(part.view(np.uint32), device) for device, part in zip(devices, parts, strict=True)]
        if self._peers is not None:
            self._peers.meet(POINT)  # collectives don't wait long
        x = self._program(jax.make_array_from_single_device_arrays(self._shape, self._sharding, words, dtype=np.uint32))
        sums = {shard.device: shard.data for shard in x.addressable_shards}
        return [np.asarray(sums[device]).view(np.uint8) for device in devices]


def _place(held: Sequence[Block], numbers: Sequence[int]) -> list[tuple[Block, int]]:
    """Place a device's blocks of some arrays one after another in a buffer; return (block, offset of its first byte).

    The offsets are the same on every device, since all shards of an array have the same size.
    """
    placed, at = [], 0
    of_array = {block.array: block for block in held}
    for number in numbers:
        placed.append((of_array[number], at))
        at += _round_up(of_array[number].size)
    return placed


def _overlap(start: int, size: int, at: int, length: int) -> tuple[slice, slice]:
    """Find the bytes of a buffer that are both in a chunk and in a block; return (slice of chunk, slice of block).

    The chunk is the `size` bytes of the buffer from offset `start`, the block the `length` bytes from offset `at`.
    Example: _overlap(start=0, size=10, at=8, length=4) returns (slice(8, 10), slice(0, 2)).
    """
    low = max(start, at)
    high = max(low, min(start + size, at + length))
    return slice(low - start, high - start), slice(low - at, high - at)


def _round_up(size: int) -> int:
    return size + -size % _WORD
