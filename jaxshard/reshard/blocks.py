"""Find the blocks of a transfer: the boxes of an array that a source shard and a target shard have in common.

Boxes are in the coordinates of the logical array, which do not depend on the padding and the order of blocks on either
side. A weight f32[4, 5], moved from two devices that split its rows to three that split its columns, with padding:

    source shards    target shards    blocks, named after both
    a a a a a        x x y y z .      ax ax ay ay az
    a a a a a        x x y y z .      ax ax ay ay az
    b b b b b        x x y y z .      bx bx by by bz
    b b b b b        x x y y z .      bx bx by by bz
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.core.placement import View

Index = tuple[int, ...]


class Side(NamedTuple):
    """One side of a transfer: how an array is stored before it, or after it.

    Attributes:
      view: the stored shape.
      mesh: the mesh.
      spec: how the stored array is split.
      memory: the memory kind of the stored array, such as "pinned_host"; "" is the devices' own memory.
    """

    view: View
    mesh: Mesh
    spec: PartitionSpec
    memory: str = ""

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the stored array in the devices' own memory."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of the mesh, in its row-major order."""
        return tuple(self.mesh.devices.flat)


class Region(NamedTuple):
    """A box of the logical array that some devices store contiguously.

    Attributes:
      start: the first index in each dimension.
      stop: the first index after it in each dimension.
      at: the index of the box's first element in the shard, one entry per stored dimension.
      devices: the devices that have this shard.
    """

    start: Index
    stop: Index
    at: Index
    devices: tuple[jax.Device, ...]


class Block(NamedTuple):
    """A box that source shards and target shards have in common.

    Attributes:
      shape: the shape of the box.
      source_at: the index of its first element in the source shard.
      holders: the devices that have it.
      target_at: the index of its first element in the target shard.
      takers: the devices that need it.
    """

    shape: Index
    source_at: Index
    holders: tuple[jax.Device, ...]
    target_at: Index
    takers: tuple[jax.Device, ...]


@lru_cache(maxsize=1024)
def find_blocks(source: Side, target: Side) -> tuple[Block, ...]:
    """List all blocks of an array: each element that a target device stores is in exactly one of its blocks."""
    found = []
    before, after = list(_regions(source)), list(_regions(target))
    for there, here in itertools.product(after, before):
        start, stop = tuple(map(max, here.start, there.start)), tuple(map(min, here.stop, there.stop))
        if all(map(int.__lt__, start, stop)):
            shape = tuple(b - a for a, b in zip(start, stop))
            found.append(Block(shape, _at(here, start), here.devices, _at(there, start), there.devices))
    return tuple(found)


def split_block(block: Block, elements: int) -> Iterator[Block]:
    """Cut a block along its largest dimension until each piece has at most `elements` elements (or just one)."""
    size = max(block.shape, default=1)
    if math.prod(block.shape) <= elements or size == 1:
        yield block
        return
    dim = block.shape.index(size)
    for start, stop in ((0, size // 2), (size // 2, size)):
        shape = (*block.shape[:dim], stop - start, *block.shape[dim + 1 :])
        source_at, target_at = (_shift(at, dim - len(shape), start) for at in (block.source_at, block.target_at))
        yield from split_block(block._replace(shape=shape, source_at=source_at, target_at=target_at), elements)


def _regions(side: Side) -> Iterator[Region]:
    """Yield the logical boxes of all distinct shards, without padding; each with all devices that have the shard."""
    view, shards = side.view, dict[tuple[tuple[int, int], ...], list[jax.Device]]()
    for device, index in side.sharding.devices_indices_map(view.stored).items():
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index, view.stored))
        shards.setdefault(bounds, []).append(device)
    for bounds, devices in shards.items():
        unfolded, rest = bounds[: view.extra_dims], bounds[view.extra_dims :]
        for outer in itertools.product(*(range(*one) for one in unfolded)):
            first = 0  # the logical index along dimension 0 at which this part of the stored array begins
            for position, size in zip((*outer, 0), view.stored) if view.extra_dims else ():
                first = first * size + position
            shifts = (first, *(0,) * len(rest))
            start = tuple(low + shift for (low, _), shift in zip(rest, shifts))
            stop = tuple(min(high + shift, size) for (_, high), shift, size in zip(rest, shifts, view.logical))
            if all(map(int.__lt__, start, stop)):
                at = (*(one - low for one, (low, _) in zip(outer, unfolded)), *(0,) * len(rest))
                yield Region(start, stop, at, tuple(devices))


def _at(region: Region, start: Index) -> Index:
    """Return the index in a shard of the logical index `start`, which is in the region."""
    extra = len(region.at) - len(start)
    moved = (at + one - first for at, one, first in zip(region.at[extra:], start, region.start))
    return (*region.at[:extra], *moved)


def _shift(at: Index, dim: int, by: int) -> Index:
    """Add `by` to an index along a dimension, which is counted from the end."""
    dim += len(at)
    return (*at[:dim], at[dim] + by, *at[dim + 1 :])
