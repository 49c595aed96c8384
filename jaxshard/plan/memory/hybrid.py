"""Gradients that are scattered over one axis, and their parts summed over another one: those of hybrid sharding.

All the sums of a step then stand behind its backward pass. XLA for TPUs keeps products for that place which nothing
needs before, to run beside them.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxshard.plan.memory.graph import Op, Region, Value, dtype_bits
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.order import SUMS
from jaxshard.plan.memory.shards import SCATTERS
from jaxshard.plan.memory.tiles import SUBLANES

_SAME = frozenset({"optimization_barrier", "enter", "reshape", "convert_element_type", "name", "transpose"})
"""Operations that pass an array on in another form."""


def sums_stacks_twice(region: Region) -> bool:
    """Return True where what a loop stacks is scattered behind it, and the parts are summed over other axes."""
    return _sums_twice(region, (one for op in region.ops if op.name == "scan" for one in op.outs[op.counts[1] :]))


def sums_products_twice(region: Region) -> bool:
    """Return True where a step without loops scatters what products make, and sums the parts over other axes."""
    if any(op.regions for op in region.ops):
        return False
    return _sums_twice(region, (one for op in region.ops if op.name in PRODUCTS for one in op.outs))


def _sums_twice(region: Region, values: Iterable[Value]) -> bool:
    readers: dict[Value, list[Op]] = {}
    for op in region.ops:
        for one in op.ins:
            readers.setdefault(one, []).append(op)

    def followed(value: Value, names: Iterable[str]) -> list[Op]:
        found = []
        for op in readers.get(value, ()):
            if op.name in names:
                found.append(op)
            elif op.name in _SAME:
                found += followed(op.outs[op.ins.index(value)] if len(op.outs) > 1 else op.outs[0], names)
        return found

    sums = SUMS.difference(SCATTERS)
    return any(followed(part, sums) for one in values for op in followed(one, SCATTERS) for part in op.outs)


def scatter_early(region: Region, *, beside: bool) -> None:
    """Scatter matrices as soon as they are there, where products wait for the sums behind the backward pass.

    SparseCores do it beside other operations. Without them it is done of matrices whose parts end within a tile: what
    runs there is an all-reduce of which each device takes its part, to the scheduler an operation that makes less than
    it reads. Other scatters are taken to stay behind the backward pass, where a program has them: in some programs
    they run sooner, and fewer gradients wait.

    Args:
      region: a step.
      beside: SparseCores run sums.
    """
    if not sums_products_twice(region):
        return
    makers = {one: op for op in region.ops for one in op.outs}
    behind: dict[Op, list[Op]] = {}
    for op in region.ops:
        if op.name not in SCATTERS or not (beside or ends_within_a_tile(op)):
            continue
        chain, maker = [op], makers.get(op.ins[0])
        while maker is not None and maker.name in _SAME and len(maker.ins) == 1:
            chain.append(maker)
            maker = makers.get(maker.ins[0])
        if maker is not None:
            behind[maker] = [*behind.get(maker, ()), *chain[::-1]]
    moved = {op for chain in behind.values() for op in chain}
    region.ops = [one for op in region.ops if op not in moved for one in (op, *behind.get(op, ()))]


def ends_within_a_tile(scatter: Op) -> bool:
    """True where the part of a matrix is some of its rows, and they do not fill tiles."""
    part, whole = scatter.outs[0], scatter.ins[0]
    if len(part.shard) != 2 or part.shard[0] == whole.shard[0]:
        return False
    return part.shard[0] % (SUBLANES * max(1, 32 // dtype_bits(part.dtype))) > 0
