"""Zeros that loops write into and other operations read: one array on GPUs, of which each loop has a copy.

XLA joins equal arrays of numbers, and fuses a result into all that read it or into none of them. Zeros that a loop
begins with are in memory, so that the same zeros elsewhere are read from there: an update that is zero where a
gradient is not finite reads them behind the backward pass. They live until then. What is gathered along another
dimension than the first is updated in the gather's layout, with zeros of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxshard.plan.memory.donated import is_put_in_order
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.scattered import FUSES_UPDATE
from jaxshard.plan.memory.shards import COLLECTIVES, GATHERS

ZEROS = "zeros"
"""An array of zeros in memory."""

_PASSED_ON = frozenset({"broadcast_in_dim", "convert_element_type", "enter", "pvary", "sharding_constraint"})
"""Operations that make an array of one number, or pass it on."""

_Kind = tuple[tuple[int, ...], Any]


def share_zeros(region: Region) -> None:
    """Read zeros from memory that a loop or a scatter of the same region begins with, from before the first of them."""
    for op in region.ops:
        for inner in op.regions:
            share_zeros(inner)
    makers = {one: op for op in region.ops for one in op.outs}
    begun: dict[_Kind, Op] = {}
    turned = {op.ins[0].shard for op in region.ops if _is_gather(op) and is_put_in_order(op)}
    for op in region.ops:
        for kind in _begun(op, makers):
            if kind[0] not in turned:
                begun.setdefault(kind, op)
    joined: dict[_Kind, Value] = {}
    same: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in region.ops:
        zero = bool(op.outs) and _is_zero(op.outs[0], makers) and _is_read(op.outs[0], region)
        if zero and (kind := _kind(op.outs[0])) in begun:
            same[op.outs[0]] = joined.setdefault(kind, op.outs[0])
        else:
            ops.append(op)
    region.ops = ops
    for kind, value in joined.items():
        at = zeros_before(region.ops, region.ops.index(begun[kind]))
        region.ops.insert(at, Op(ZEROS, [], [value], begun[kind].path))
    for op in region.ops:
        op.ins = [same.get(one, one) for one in op.ins]


def zeros_before(ops: Sequence[Op], at: int) -> int:
    """Return the place at which XLA for GPUs makes the zeros that a loop writes into.

    It does so in the gaps between the operations that lead from the loop before to this one, or, where there are no
    products among these, beside the gather with which a program begins.
    """
    behind = [i + 1 for i, op in enumerate(ops[:at]) if op.regions]
    start = max(behind, default=0)
    first = next((i for i, op in enumerate(ops[:at]) if op.regions or _is_gather(op)), at)
    if first < at and not ops[first].regions and not any(op.name in PRODUCTS for op in ops[start:at]):
        return first
    return start


def _is_gather(op: Op) -> bool:
    return op.name in GATHERS and math.prod(op.ins[0].shard) < math.prod(op.outs[0].shard)


def _begun(op: Op, makers: dict[Value, Op]) -> Iterator[_Kind]:
    """Yield the shapes and types of zeros that an operation writes into: of stacks, of sums and of scatters."""
    if op.name == "scan":
        stacks = list(zip(op.outs, op.regions[0].outputs, strict=True))[op.counts[1] :]
        reduced = [one for one, turn in stacks if _is_reduced(op.regions[0], turn)]
        yield from map(_kind, reduced or [one for one, _ in stacks])
    if op.name in ("scan", "while"):
        start = op.counts[0] if op.name == "scan" else sum(op.counts)
        carried = op.ins[start:][: op.counts[1] if op.name == "scan" else None]
        yield from (_kind(one) for one in carried if _is_zero(one, makers))
    elif op.name in FUSES_UPDATE and _is_zero(op.ins[0], makers):
        yield _kind(op.ins[0])


def _is_read(value: Value, region: Region) -> bool:
    """True for zeros that something reads and does not write into."""
    readers = [op for op in region.ops if value in op.ins]
    return bool(readers) and all(not op.regions and op.name not in FUSES_UPDATE for op in readers)


def _is_zero(value: Value, makers: dict[Value, Op]) -> bool:
    """True for an array of zeros that the program has as a number."""
    op = makers.get(value)
    if op is None or op.name not in _PASSED_ON or len(op.ins) > 1:
        return False
    return _is_zero(op.ins[0], makers) if op.ins else op.number is not None and not np.any(op.number)


def _is_reduced(body: Region, value: Value) -> bool:
    """True for a result of a loop's body that a collective makes."""
    made = {one: op for op in body.ops for one in op.outs}
    while (op := made.get(value)) is not None:
        if op.name in COLLECTIVES:
            return True
        alike = [one for one in op.ins if math.prod(one.shard) == math.prod(value.shard)]
        if len(alike) != 1:
            return False
        (value,) = alike
    return False


def _kind(value: Value) -> _Kind:
    return value.shard, value.dtype
