"""Sums over devices that a loop only adds up: compilers take them behind the loop, which then adds whole arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxshard.plan.memory.graph import Op, Region, Value, eliminate
from jaxshard.plan.memory.shards import SCATTERS

_ADDS = frozenset({"add", "add_any"})
_PASSED_ON = frozenset({"convert_element_type", "enter", "pvary"})
"""Operations that may lie between a scatter and what it is added to."""


def scatter_behind_loops(region: Region) -> None:
    """Move scatters behind the loops that only add their results to what they carry.

    So are gradients of micro-batches summed under ZeRO-2. XLA for TPUs runs one scatter in place of one in each turn
    (`WhileLoopAllReduceCodeMotion`, with reduce-scatters), and each device carries whole sums in place of its parts.
    Sums in which anything else takes part, such as one over another axis or an update of a slice, stay.
    """
    _move(region)
    eliminate(region, set(region.outputs))


class _Sum(NamedTuple):
    """What a turn adds to a carry.

    Attributes:
      add: the operation that does.
      between: what passes the scatter's result on to it, the last first.
      scatter: the scatter.
    """

    add: Op
    between: list[Op]
    scatter: Op


def _move(region: Region) -> None:
    ops: list[Op] = []
    makers = {one: op for op in region.ops for one in op.outs}
    for op in region.ops:
        for inner in op.regions:
            _move(inner)
        if op.name not in ("scan", "while"):
            ops.append(op)
            continue
        behind: list[Op] = []
        for number, found in list(_sums(op)):
            if _is_zero(op.ins[_start(op) + number], makers):
                ops.append(_carry_whole(op, number, found))
                behind.append(_scatter_outside(op, number, found.scatter))
        ops += [op, *behind]
    region.ops = ops


def _start(loop: Op) -> int:
    """The number of the first carried operand."""
    return loop.counts[0] if loop.name == "scan" else sum(loop.counts)


def _inside(loop: Op) -> int:
    """The number of the first carried input of the body."""
    return loop.counts[0] if loop.name == "scan" else loop.counts[1]


def _sums(loop: Op) -> Iterator[tuple[int, _Sum]]:
    """Yield the carries to which each turn adds the result of a scatter, and nothing else happens."""
    (body,) = loop.regions
    uses = Counter(one for op in body.ops for one in op.ins)
    uses.update(body.outputs)
    makers = {one: op for op in body.ops for one in op.outs}
    carries = loop.counts[1] if loop.name == "scan" else len(loop.outs)
    for number, out in enumerate(body.outputs[:carries]):
        add, carried = makers.get(out), body.inputs[_inside(loop) + number]
        if add is None or add.name not in _ADDS or carried not in add.ins or len(add.ins) != 2:
            continue
        one = add.ins[1 - add.ins.index(carried)]
        between: list[Op] = []
        while (op := makers.get(one)) is not None and op.name in _PASSED_ON and uses[one] == 1:
            between.append(op)
            one = op.ins[0]
        if op is None or op.name not in SCATTERS or _is_gathered_across(op, makers):
            continue
        if uses[one] == uses[carried] == uses[out] == 1:
            yield number, _Sum(add, between, op)


def _is_gathered_across(scatter: Op, makers: dict[Value, Op]) -> bool:
    """True for a scatter of what was gathered along another dimension: compilers scatter first, and add parts."""
    op = makers.get(scatter.ins[0])
    while op is not None and op.name in _PASSED_ON and op.ins:
        op = makers.get(op.ins[0])
    if op is None or op.name != "enter_moved":
        return False
    gathered = _changed(op.ins[0], op.outs[0])
    return bool(gathered) and gathered.isdisjoint(_changed(scatter.ins[0], scatter.outs[0]))


def _changed(one: Value, other: Value) -> set[int]:
    return {dim for dim, (a, b) in enumerate(zip(one.shard, other.shard, strict=False)) if a != b}


def _is_zero(value: Value, makers: dict[Value, Op]) -> bool:
    """True for a sum that begins with numbers alone."""
    while (op := makers.get(value)) is not None and len(op.ins) == 1:
        value = op.ins[0]
    return value.role == "constant" if op is None else not op.ins


def _carry_whole(loop: Op, number: int, found: _Sum) -> Op:
    """Let a loop carry the whole sum; return the operation that begins it."""
    (body,) = loop.regions
    whole = found.scatter.ins[0]

    def enlarged(value: Value) -> Value:
        return replace(value, shape=whole.shape, split=whole.split, shard=whole.shard)

    body.ops = [op for op in body.ops if op is not found.scatter]
    carried, one = body.inputs[_inside(loop) + number], whole
    for op in reversed(found.between):
        op.ins, op.outs = [one], [enlarged(op.outs[0])]
        (one,) = op.outs
    begin, inside = enlarged(loop.ins[_start(loop) + number]), enlarged(carried)
    found.add.ins, found.add.outs = [inside, one], [enlarged(found.add.outs[0])]
    body.inputs[_inside(loop) + number] = inside
    body.outputs[number] = found.add.outs[0]
    loop.ins[_start(loop) + number] = begin
    return Op("broadcast_in_dim", [], [begin], loop.path)


def _scatter_outside(loop: Op, number: int, scatter: Op) -> Op:
    """Let the result of a loop be whole; return the operation that scatters it."""
    part, whole = loop.outs[number], scatter.ins[0]
    loop.outs[number] = replace(part, shape=whole.shape, split=whole.split, shard=whole.shard)
    return replace(scatter, ins=[loop.outs[number]], outs=[part])
