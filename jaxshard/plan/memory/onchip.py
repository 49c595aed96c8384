"""Values that a TPU's compiler keeps on the chip (VMEM), where they take nothing of the device's memory.

XLA's memory space assignment gives a place there to one value after the other: first to those whose reads and writes it
shortens most for their size (`CostAnalysis::GetMemoryBoundedness` in memory_space_assignment/cost_analysis.cc; what a
loop does counts five times). A value stays for its whole life if nothing else lies there meanwhile and it is read often
enough (`CostAnalysisPrefetchIntervalPicker`): one that lies unread for long is copied out.

What the loops of a step stack is taken to lie in the device's memory where there are SparseCores, as in nearly all
programs that were looked at. Without them a sum over devices takes room of its own on the chip while it runs.
Where two cores run as one device, each has a memory of its own on the chip: what products, collectives and kernels
make, each core a part of it, lies in the device's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Op, Value, contracted_axes
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.order import SUMS
from jaxshard.plan.memory.scattered import FUSES_UPDATE

_TURNS = 5
"""As many turns of a loop count, whatever it has (`xla_tpu_memory_space_assignment_while_execution_count`)."""

_REDUCING = 16 * 2**20
"""What a sum over devices keeps on the chip while it runs beside other operations, where there are no SparseCores.

Such an operation carries an f32[4096,8,128] with it, in programs for v5e, whatever it sums."""

_LEAST_ASIDE = 1024
"""The bytes of the smallest sums that run beside other operations."""

_UNREAD = 8
"""A value may lie unread for so many times what filling the chip takes (`max_overlap_to_mem_size_async_copy_ratio`)."""


class _Span(NamedTuple):
    """The life of a value: its first and last moment, its bytes, and what its place on the chip is worth."""

    value: Value
    first: int
    last: int
    bytes: int
    worth: float


def values_on_chip(step: Liveness, chip: Chip, *, sums_in_hbm: bool) -> set[Value]:
    """Choose the values that lie on the chip.

    Args:
      step: when the stored values of a whole step live.
      chip: with the bytes of its own memory.
      sums_in_hbm: what sums over devices read and write lies in the device's memory, where SparseCores run them.
    """
    finder = _Spans(chip, sums_in_hbm=sums_in_hbm)
    spans, end = finder.of_region(step, 0, 1)
    taken = np.zeros(end + 1, np.int64)
    taken[finder.sums] = _REDUCING
    chosen = set()
    for one in sorted(spans, key=lambda one: -one.worth):
        life = taken[one.first : one.last + 1]
        if life.max() + one.bytes <= chip.vmem_bytes:
            chosen.add(one.value)
            life += one.bytes
    return chosen


class _Spans:
    """Finds the spans of values, in moments that count the operations of all regions one after the other."""

    def __init__(self, chip: Chip, *, sums_in_hbm: bool):
        self.chip, self.sums_in_hbm = chip, sums_in_hbm
        self.clocks: dict[Liveness, list[float]] = {}
        self.sums: list[int] = []

    def of_region(self, live: Liveness, start: int, times: int) -> tuple[list[_Span], int]:
        """Return the spans of a region that begins at a moment and runs so many times, and the moment behind it."""
        found: list[_Span] = []
        at, begins, ends = start, [], []
        for op in live.ops:
            begins.append(at)
            if not self.sums_in_hbm and _sums_aside(live, op):
                self.sums.append(at)
            for body in live.inner.get(op, ()):
                inside, at = self.of_region(body, at, times * _TURNS)
                found += inside
            ends.append(at)
            at += 1
        clock = self.clock(live)
        for value, place in _stored(live):
            last, size = live.last.get(value, -1), live.stored_bytes(value)
            if not place <= last < len(live.ops) or not size or self.is_left_unread(live, clock, value, place):
                continue
            uses = _uses(live, value)
            if self.is_in_hbm(live, value, uses) or _is_written_over_input(live, value):
                continue
            if self.sums_in_hbm and times == 1 and _is_stacked(live, value):
                continue
            worth = times * sum(self.saved(live, op, size) for op in uses)
            found.append(_Span(value, begins[place], ends[last], size, worth / math.sqrt(size)))
        return found, at

    def is_in_hbm(self, live: Liveness, value: Value, uses: list[Op]) -> bool:
        """True for what lies in the device's memory because of the unit that makes or reads it."""
        if self.sums_in_hbm and any(op.name in SUMS for op in uses):
            return True
        maker = live.makers.get(value)
        return self.chip.cores > 1 and (maker is None or _is_made_by_both_cores(live, maker))

    def clock(self, live: Liveness) -> list[float]:
        """Return the seconds at which the operations of a region begin, counted from its beginning."""
        if live not in self.clocks:
            seconds = self.clocks[live] = [0.0]
            for op in live.ops:
                seconds.append(seconds[-1] + max(self.seconds(live, op)))
        return self.clocks[live]

    def seconds(self, live: Liveness, op: Op) -> tuple[float, float]:
        """Return how long an operation computes, or sends over links, and how long it reads and writes memory."""
        if op in live.inner:
            turns = _TURNS if op.name in ("scan", "while") else 1
            return turns * max((self.clock(body)[-1] for body in live.inner[op]), default=0.0), 0.0
        if live.is_alias(op) or not any(one in live.stored for one in op.outs):
            return 0.0, 0.0
        if _is_collective(op) and self.chip.network is not None:
            whole = max(live.size(one) for one in (*op.ins, *op.outs))
            links = 2 * self.chip.network.dims * self.chip.network.bandwidth
            return (2 if op.name in SUMS else 1) * whole / links, 0.0
        moved = sum(live.size(one) for one in (*op.outs, *live.roots_of(op)))
        return _multiplied(op) / self.chip.peak_flops, moved / self.chip.hbm_bandwidth

    def saved(self, live: Liveness, op: Op, size: int) -> float:
        """Return the bytes of a value that an operation reads or writes, if that takes longer than it computes."""
        if op.name == "scan":
            turns: int = op.params["length"]
            return size * _TURNS / max(1, turns)
        computes, moves = self.seconds(live, op)
        return size if moves > computes else 0.0

    def is_left_unread(self, live: Liveness, clock: list[float], value: Value, place: int) -> bool:
        """True if a value lies longer between two uses than the compiler leaves it on the chip."""
        most = _UNREAD * self.chip.vmem_bytes / self.chip.hbm_bandwidth
        # What reads a copy of an argument is not noted, but for the last of it.
        read = {live.runs.get(op, live.place[op]) for op in live.readers[value]} or {live.last[value]}
        places = sorted({place, *read})
        between = [clock[after] - clock[before + 1] for before, after in itertools.pairwise(places)]
        turns = [self.clock(body)[-1] for op in _uses(live, value) for body in live.inner.get(op, ())]
        return max((*between, *turns), default=0.0) > most


def _stored(live: Liveness) -> Iterator[tuple[Value, int]]:
    """Yield the stored values of a region, and its converted copies of arguments, with the places where they begin."""
    for op in live.ops:
        if not live.is_alias(op):
            for one in op.outs:
                if one in live.stored and one not in live.inputs and one not in live.in_place:
                    yield one, live.place[op]
    for place, copies in live.copies.items():
        yield from ((one, place) for one in copies)


def _uses(live: Liveness, value: Value) -> list[Op]:
    maker = live.makers.get(value)
    return [*([] if maker is None else [maker]), *live.readers[value]]


def _is_made_by_both_cores(live: Liveness, maker: Op) -> bool:
    """True for a product, with what is computed in one with it, a collective or a kernel."""
    if maker.regions:
        return False
    return not live.is_elementwise(maker) or any(live.find(one) in live.pending for one in maker.ins)


def _is_written_over_input(live: Liveness, value: Value) -> bool:
    """True for what updates write into what a loop carries, one after the other: all of them are one array."""
    while (maker := live.makers.get(value)) is not None and maker.name in FUSES_UPDATE:
        value = live.find(maker.ins[0])
    return value in live.inputs


def _is_stacked(live: Liveness, value: Value) -> bool:
    maker = live.makers.get(value)
    return maker is not None and maker.name == "scan" and maker.outs.index(value) >= maker.counts[1]


def _is_collective(op: Op) -> bool:
    chosen = op.name == "sharding_constraint" and op.ins[0].split != op.outs[0].split
    return chosen or op.name == "all_gather" or op.name in SUMS


def _sums_aside(live: Liveness, op: Op) -> bool:
    """True for a sum, or a maximum, over devices that is not too small to run beside other operations."""
    if op.name == "dot_general":
        over = bool(contracted_axes(op))
    elif "reduce" in op.name and "axes" in op.params:
        over = any(op.ins[0].split[dim] for dim in op.params["axes"])
    else:
        over = op.name in SUMS or op.name in ("pmax", "pmin")
    return over and max(map(live.size, op.outs)) >= _LEAST_ASIDE


def _multiplied(op: Op) -> float:
    """The FLOPs of a matrix product; 0 of all else."""
    if op.name != "dot_general":
        return 0.0
    contracted: tuple[int, ...] = op.params["dimension_numbers"][0][0]
    return 2.0 * math.prod(op.outs[0].shard) * math.prod(op.ins[0].shard[dim] for dim in contracted)
