"""Weights with more than two dimensions that a TPU gathers, and the layouts that a gather can write.

Parts that end within the lanes of a tile can't be put one behind the other along them. Products read what is gathered
as it is; what a loop reads is copied to the layout that takes least.
"""

from __future__ import annotations

import itertools

from jaxshard.plan.memory.graph import Op, Region, Value, dtype_bits
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.shards import GATHERS
from jaxshard.plan.memory.tiles import LANES, SUBLANES, padded_bytes

_SAME = ("enter", "name", "optimization_barrier", "sharding_constraint")


def gathered_along(region: Region) -> dict[Value, int]:
    """Find what is gathered of parts that do not fill the lanes of tiles, and the dimension along which.

    Arrays with the same memory are found too, those that something else than a product reads are not.
    """
    readers: dict[Value, list[Op]] = {}
    for op in region.ops:
        for one in op.ins:
            readers.setdefault(one, []).append(op)
    found: dict[Value, int] = {}
    for op in region.ops:
        for inner in op.regions:
            found |= gathered_along(inner)
        along = _gathered_dim(op)
        if along is None:
            continue
        alike, uses = [op.outs[0]], list[Op]()
        for value in alike:
            for reader in readers.get(value, ()):
                if reader.name in _SAME and reader.outs[0].shard == value.shard:
                    alike.append(reader.outs[0])
                else:
                    uses.append(reader)
        if all(one.name in PRODUCTS for one in uses):
            found |= dict.fromkeys(alike, along)
    return found


def _gathered_dim(op: Op) -> int | None:
    """Return the dimension along which an operation gathers parts that end within a tile; None if it does not."""
    if op.name not in GATHERS or len(op.ins) != 1 or len(op.outs[0].shard) < 3:
        return None
    pairs = list(zip(op.ins[0].shard, op.outs[0].shard, strict=False))
    dims = [dim for dim, (part, whole) in enumerate(pairs) if part < whole]
    return dims[0] if len(dims) == 1 and pairs[dims[0]][0] % LANES else None


def gathered_bytes(value: Value, along: int) -> int:
    """Count the bytes of a gathered array on one device, in the layout that takes least of those that gathers write."""
    pairs = itertools.permutations(range(len(value.shard)), 2)
    return min(padded_bytes(value.shard, value.dtype, *pair) for pair in pairs if pair[0] != along)


def joined_bytes(gather: Op) -> int:
    """Count the bytes of gathered matrices one behind the other along the dimension that is split, padded to tiles."""
    (part, *_), (made,) = gather.ins, gather.outs
    split = 0 if part.shard[0] < made.shard[0] else 1
    count = -(-made.shard[split] // part.shard[split])
    size, other = part.shard[split], made.shard[1 - split]
    tile = min(1 << (size - 1).bit_length(), SUBLANES)
    rows, lanes = size + -size % tile, other + -other % LANES
    return count * rows * lanes * dtype_bits(made.dtype) // 8
