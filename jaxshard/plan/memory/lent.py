"""Donated parameters whose memory other arrays use until the new ones are gathered.

Under ZeRO a device updates its part of a parameter, which the step cuts out before anything else. Nothing reads the
whole parameter behind the last product, or the copy for loops, that does: until the new one is gathered its memory is
free. XLA places what a program makes from the largest array to the smallest, each into the smallest memory of an
argument that is free as long as the array lives (`BufferAssigner::AssignSingleHloBuffer` in buffer_assignment.cc), and
only the rest into memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxshard.plan.memory.graph import CUT, Op, Region, Value
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.scattered import FUSES_UPDATE
from jaxshard.plan.memory.tiles import padded_bytes

_SMALL = 2**20
"""Bytes of arrays that are not looked at: they change little."""


def cut_parts_first(region: Region) -> None:
    """Let operations read parameters themselves that stand behind a barrier, and mark the parts cut before it.

    Args:
      region: a step, which cuts parameters before all else and passes parameter and part through a barrier.
    """
    makers = {one: op for op in region.ops for one in op.outs}
    same: dict[Value, Value] = {}
    barriers: set[Op] = set()
    for op in region.ops:
        if op.name != "optimization_barrier" or len(op.ins) != 2 or op.ins[0].role != "parameters":
            continue
        cut = makers.get(op.ins[1])
        if cut is None or cut.name != "sharding_constraint" or _count(cut.outs[0]) >= _count(op.ins[0]):
            continue
        cut.name = CUT
        same |= dict(zip(op.outs, op.ins, strict=True))
        barriers.add(op)
    region.ops = [op for op in region.ops if op not in barriers]
    for op in region.ops:
        op.ins = [same.get(one, one) for one in op.ins]
    region.outputs = [same.get(one, one) for one in region.outputs]


class _Span(NamedTuple):
    """The first and last moment at which memory is used, or free."""

    first: int
    last: int


class _Array(NamedTuple):
    """Values that are one array in memory, one after the other, its bytes and its life."""

    bytes: int
    life: _Span
    values: set[Value]


def values_in_parameters(step: Liveness, elsewhere: set[Value]) -> set[Value]:
    """Find the values of a step that lie where donated parameters were.

    Args:
      step: when the stored values of a whole step live.
      elsewhere: the values that take none of the device's memory anyway.
    """
    moments = _Moments(elsewhere)
    begins = moments.count(step)[0]
    rooms = sorted(_rooms(step, begins, moments.copies), key=lambda one: one[0])
    used: list[list[_Span]] = [[] for _ in rooms]
    found: set[Value] = set()
    for array in sorted(moments.arrays if rooms else (), key=lambda one: -one.bytes):
        for (size, free), lives in zip(rooms, used, strict=True):
            within = free.first <= array.life.first and array.life.last <= free.last
            if array.bytes <= size and within and all(_are_apart(array.life, one) for one in lives):
                lives.append(array.life)
                found |= array.values
                break
    return found


def _are_apart(one: _Span, other: _Span) -> bool:
    return one.last < other.first or other.last < one.first


class _Moments:
    """Counts the operations of all regions one after the other, and finds the arrays of each region.

    Attributes:
      elsewhere: values that are not looked at.
      arrays: what was found.
      copies: when each converted copy of an argument is made: one after the other, the smallest first.
      stacks: when what each operation stacks is allocated: before the copies that it reads.
    """

    def __init__(self, elsewhere: set[Value]):
        self.elsewhere, self.arrays, self.copies = elsewhere, list[_Array](), dict[Value, int]()
        self.stacks: dict[Op, int] = {}
        self.at = 0

    def count(self, live: Liveness) -> tuple[list[int], list[int]]:
        """Return the first and the last moment of each operation of a region."""
        begins, ends = [], []
        for i, op in enumerate(live.ops):
            self.stacks[op] = self.at
            self.at += 1
            for copy in sorted(live.copies.get(i, ()), key=live.size):
                self.copies[copy] = self.at
                self.at += 1
            begins.append(self.at)
            for body in live.inner.get(op, ()):
                self.count(body)
            ends.append(self.at)
            self.at += 1
        self._find_arrays(live, begins, ends)
        return begins, ends

    def _find_arrays(self, live: Liveness, begins: list[int], ends: list[int]) -> None:
        joined: dict[Value, _Array] = {}
        for value, first, size in self._stored(live, begins):
            last = ends[live.last[value]] if live.last.get(value, len(ends)) < len(ends) else -1
            if value in self.elsewhere or size <= _SMALL or last < first:
                continue
            begun = _continued(live, value)
            before = None if begun is None else joined.pop(begun, None)
            array = _Array(max(size, _written_bytes(live, value)), _Span(first, last), {value})
            if begun is not None and before is not None and before.bytes == size:
                zeros = not live.makers[begun].ins  # made right before the loop, behind the copies that it reads
                array = array._replace(
                    values={begun, value}, life=array.life if zeros else _Span(before.life.first, last)
                )
                array.values.update(before.values)
            joined[value] = array
        self.arrays += joined.values()

    def _stored(self, live: Liveness, begins: list[int]) -> Iterator[tuple[Value, int, int]]:
        """Yield the values of a region that have memory of their own, when they begin, and their bytes."""
        for op in live.ops:
            if not live.is_alias(op):
                for one in op.outs:
                    if one in live.stored and one not in live.inputs and one not in live.in_place:
                        stacked = op.name == "scan" and op.outs.index(one) >= op.counts[1]
                        first = self.stacks[op] if stacked and "transpose" not in op.path else begins[live.place[op]]
                        yield one, first, live.stored_bytes(one)
        for copies in live.copies.values():
            yield from ((one, self.copies[one], live.size(one)) for one in copies if one in self.copies)


def _continued(live: Liveness, value: Value) -> Value | None:
    """Return the value that the operation reads last which writes this one into its array; None if there is none."""
    op = live.makers.get(value)
    if op is None:
        return None
    number, written = op.outs.index(value), None
    if op.name == "scan" and number < op.counts[1]:
        written = op.ins[op.counts[0] + number]
    elif op.name == "while":
        written = op.ins[sum(op.counts) + number]
    elif op.name in FUSES_UPDATE:
        written = op.ins[0]
    if written is None or live.last.get(live.find(written)) != live.place[op]:
        return None
    return live.find(written)


def _written_bytes(live: Liveness, value: Value) -> int:
    """Return the bytes of what a loop carries and writes slices of: they lie along the lanes; 0 of other values."""
    op = live.makers.get(value)
    if op is None or op.name != "scan" or op.outs.index(value) >= op.counts[1]:
        return 0
    (body,) = op.regions
    out = body.outputs[op.outs.index(value)]
    write = next((inner for inner in body.ops if out in inner.outs), None)
    if write is None or write.name != "dynamic_update_slice" or len(value.shard) < 2:
        return 0
    sizes = zip(write.ins[0].shard, write.ins[1].shard, strict=True)
    sliced = [dim for dim, (whole, part) in enumerate(sizes) if part < whole]
    if len(sliced) != 1:
        return 0
    others = [dim for dim in range(len(value.shard)) if dim not in sliced]
    return min(padded_bytes(value.shard, value.dtype, sliced[0], other) for other in others)


def _rooms(step: Liveness, begins: list[int], copies: Mapping[Value, int]) -> Iterator[tuple[int, _Span]]:
    """Yield the bytes of parameters of which parts are cut first, and when their memory is free."""
    cut = {step.find(op.ins[0]) for op in step.ops if op.name == CUT}
    for argument, result in zip(step.region.inputs, step.region.outputs, strict=False):
        maker = step.makers.get(step.find(result))
        if argument not in cut or maker is None or argument in step.results or step.size(argument) <= _SMALL:
            continue
        copied = step.copied.get(argument)
        made = [] if copied is None else [copies[copied[1]]]
        reads = [begins[step.runs[op]] for op in step.readers[argument] if copied is None or not op.regions]
        last = max([*made, *reads], default=0)
        if last < begins[step.place[maker]]:
            yield step.size(argument), _Span(last + 1, begins[step.place[maker]] - 1)


def _count(value: Value) -> int:
    return math.prod(value.shard)
