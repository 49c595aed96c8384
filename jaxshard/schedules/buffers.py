"""Buffers for a schedule: which slot every value lies in while it waits, as rows of small numbers, one row per tick.

A value waits on a device between the event that writes it and the last one that reads it. Each device has four buffers:

    buffer    value                                  written by                        last read by
    inbox     input of a chunk                       arrival, or embed for stage 0     its F
    kept      residuals of a chunk                   F                                 its B
    outbox    output of the last stage               F                                 head, which puts dy in its place
              cotangent dy of a chunk's output       arrival, or head                  its B
              cotangent dx of the model's input      B of stage 0                      embed_grad
    carried   what the weights' gradients need       B                                 its W

All devices run one program, so all have buffers as long as the device that needs most. A device without an operation
computes all the same, on whatever it reads; its slot is -1, to which nothing is written.

Slots are given first come, first served: a value takes the lowest slot that is free when it is written. (Lifetimes are
intervals, for which this needs as few slots as the largest number of values that wait at once.) For
`one_f_one_b(2, 3)`, the micro-batches in the slots of `kept` during each tick:

    tick       0 1 2 3 4 5
    device 0 F 0 1 2                        f_kept =  0 1 2 - - -      b_kept = - - - 0 1 2
             B       0 1 2
       slot 0  0 0 0 0
            1    1 1 1 1
            2      2 2 2 2
    device 1 F   0 1 2                      f_kept =  - 0 1 0 - -      b_kept = - - 0 1 0 -
             B     0 1 2
       slot 0    0 0 2 2                    In tick 2, F of 1 comes before B of 0: slot 0 is still taken.
            1      1 1                      In tick 3 it is free for F of 2.

Device 0 needs three slots, so `sizes["kept"] == 3` on both. (A "-" stands for -1.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxshard.schedules.runs import Run, embed_grad_runs, embed_runs, head_runs, output_runs
from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.table import Op

# The events of a tick, in their order. A time is (tick, event), so times compare as they follow each other.
_EMBED, _FORWARD, _HEAD, _BACKWARD, _EMBED_GRAD, _WEIGHTS, _ARRIVAL = range(7)
_Time = tuple[int, int]

_BUFFER_OF = {"input": "inbox", "kept": "kept", "cotangent": "outbox", "result": "outbox", "carried": "carried"}
"""The buffer of each kind of value. A last stage's output and the cotangent that takes its place are one value."""

_SLOT_COLUMNS = (
    "f_inbox", "f_kept", "f_outbox", "b_outbox", "b_kept", "b_result", "b_carried", "w_carried", "arrive_f", "arrive_b"
)  # fmt: skip


class Value(NamedTuple):
    """A value that waits in a buffer: its kind (see `_BUFFER_OF`), of which stage and micro-batch."""

    kind: str
    stage: int
    microbatch: int


class Lifetime(NamedTuple):
    """From when until when a value waits, and on which device."""

    device: int
    value: Value
    written: _Time
    last_read: _Time


@dataclass(frozen=True)
class BufferPlan:
    """A schedule with a slot for every value.

    Attributes:
      schedule: the table.
      rows: columns of integers by name, [ticks, devices] or, where all devices do alike, [ticks]:
        - "f_chunk", "f_microbatch", "b_...", "w_...": what the operation works on; microbatch -1 where there is none.
        - "f_inbox", "f_kept", "f_outbox", "b_outbox", "b_kept", "b_carried", "b_result", "w_carried": the slots that it
          reads and writes ("b_result" is where stage 0 puts dx for the embedding), -1 where there is none.
        - "arrive_f", "arrive_b": the slots for what the neighbours sent, written at the end of the tick; -1 likewise.
        - "f", "b", "w" [ticks]: 1 if any device has such an operation.
        - "embed", "head", "embed_grad" [ticks]: the number of the run that happens in the tick, -1 without one.
      runs: for "embed", "head" and "embed_grad" the arrays
        members [runs + 1, devices]: the micro-batch on which each device works, -1 without one;
        slots [runs + 1, devices, devices]: on each device the slot of each member's value. Only the first (for "head"
        the last) device has the values, the others have -1 throughout.
        The last row is that of no run, which the number -1 stands for: no micro-batches and no slots.
      sizes: the lengths of the buffers.
    """

    schedule: Schedule
    rows: dict[str, np.ndarray]
    runs: dict[str, tuple[np.ndarray, np.ndarray]]
    sizes: dict[str, int]


def plan_buffers(schedule: Schedule) -> BufferPlan:
    """Return the plan of a verified schedule, every buffer as short as can be."""
    runs = {"embed": embed_runs(schedule), "head": head_runs(schedule), "embed_grad": embed_grad_runs(schedule)}
    return _plan(schedule, schedule.ops, runs)


def plan_forward_buffers(schedule: Schedule) -> BufferPlan:
    """Return the plan of a schedule's forwards alone, which evaluation runs."""
    ops = [op for op in schedule.ops if op.kind == "F"]
    runs = {"embed": embed_runs(schedule), "head": output_runs(schedule), "embed_grad": []}
    return _plan(schedule, ops, runs)


def _plan(schedule: Schedule, ops: Sequence[Op], runs: dict[str, list[Run]]) -> BufferPlan:
    slots, sizes = _assign_slots(_lifetimes(schedule, ops, runs))
    ticks, last = ops[-1].tick + 1, schedule.stages * schedule.chunks - 1
    shape = ticks, schedule.stages
    rows: dict[str, np.ndarray] = {f"{kind}_chunk": np.full(shape, 0) for kind in "fbw"}
    rows |= {f"{kind}_microbatch": np.full(shape, -1) for kind in "fbw"}
    rows |= {column: np.full(shape, -1) for column in _SLOT_COLUMNS}
    rows |= {kind: np.full(ticks, 0) for kind in "fbw"}
    rows |= {name: np.full(ticks, -1) for name in runs}
    for op in ops:
        _write_operation(rows, schedule, op, slots)
    for name, these in runs.items():
        for number, run in enumerate(these):
            rows[name][run.tick] = number
    # Where the values of a run are: their kind and stage, and the device that has them all.
    p = schedule.stages
    wanted = {"embed": ("input", 0, 0), "head": ("cotangent", last, p - 1), "embed_grad": ("result", 0, 0)}
    arrays = {name: _run_arrays(runs[name], p, *of, slots) for name, of in wanted.items()}
    return BufferPlan(schedule, {name: _narrow(x) for name, x in rows.items()}, arrays, sizes)


def _lifetimes(schedule: Schedule, ops: Sequence[Op], runs: dict[str, list[Run]]) -> Iterator[Lifetime]:
    """Every value that operations and runs leave for others, as in the table at the top of this file."""
    last, split = schedule.stages * schedule.chunks - 1, schedule.splits_backward
    at = {schedule.key(op): op.tick for op in ops}
    tick_of = {name: {m: run.tick for run in these for m in run.microbatches} for name, these in runs.items()}
    for op in ops:
        device, stage, m = op.device, schedule.stage(op), op.microbatch
        if op.kind == "F":
            now = op.tick, _FORWARD
            arrival = (at["F", stage - 1, m], _ARRIVAL) if stage else (tick_of["embed"][m], _EMBED)
            yield Lifetime(device, Value("input", stage, m), arrival, now)
            # Without a B (in evaluation) nothing is kept, and the last stage's output waits for the head alone.
            if ("B", stage, m) in at:
                yield Lifetime(device, Value("kept", stage, m), now, (at["B", stage, m], _BACKWARD))
            elif stage == last:
                yield Lifetime(device, Value("cotangent", stage, m), now, (tick_of["head"][m], _HEAD))
        elif op.kind == "B":
            now = op.tick, _BACKWARD
            arrival = (at["F", stage, m], _FORWARD) if stage == last else (at["B", stage + 1, m], _ARRIVAL)
            yield Lifetime(device, Value("cotangent", stage, m), arrival, now)
            if stage == 0:
                yield Lifetime(device, Value("result", stage, m), now, (tick_of["embed_grad"][m], _EMBED_GRAD))
            if split:
                yield Lifetime(device, Value("carried", stage, m), now, (at["W", stage, m], _WEIGHTS))


def _assign_slots(lifetimes: Iterable[Lifetime]) -> tuple[dict[Value, int], dict[str, int]]:
    """(the slot of every value, the length of every buffer)."""
    by_buffer = defaultdict(list)
    for device, value, written, last_read in lifetimes:
        by_buffer[device, _BUFFER_OF[value.kind]].append((written, last_read, value))
    slots: dict[Value, int] = {}
    sizes = dict.fromkeys(_BUFFER_OF.values(), 0)
    for (_, buffer), lives in by_buffer.items():
        free_from: list[_Time] = []  # for each slot, when its value was read for the last time
        for written, last_read, value in sorted(lives):
            slot = next((i for i, free in enumerate(free_from) if free <= written), len(free_from))
            # Replaces the slot's time, or appends one where no slot was free.
            free_from[slot : slot + 1] = [last_read]
            slots[value] = slot
        sizes[buffer] = max(sizes[buffer], len(free_from))
    return slots, sizes


def _write_operation(rows: dict[str, np.ndarray], schedule: Schedule, op: Op, slots: dict[Value, int]) -> None:
    """Write an operation into its row: its own numbers, and the slot for its result at the device that receives it."""
    stage, m, last = schedule.stage(op), op.microbatch, schedule.stages * schedule.chunks - 1
    here, kind = (op.tick, op.device), op.kind.lower()

    def slot(of: str, at: int = stage) -> int:
        return slots[Value(of, at, m)]

    rows[kind][op.tick] = 1
    rows[f"{kind}_chunk"][here] = op.chunk
    rows[f"{kind}_microbatch"][here] = m
    if op.kind == "F":
        rows["f_inbox"][here] = slot("input")
        if Value("kept", stage, m) in slots:
            rows["f_kept"][here] = slot("kept")
        if stage == last:
            rows["f_outbox"][here] = slot("cotangent")
        else:
            rows["arrive_f"][op.tick, (op.device + 1) % schedule.stages] = slot("input", stage + 1)
    elif op.kind == "B":
        rows["b_outbox"][here] = slot("cotangent")
        rows["b_kept"][here] = slot("kept")
        if stage == 0:
            rows["b_result"][here] = slot("result")
        else:
            rows["arrive_b"][op.tick, (op.device - 1) % schedule.stages] = slot("cotangent", stage - 1)
        if schedule.splits_backward:
            rows["b_carried"][here] = slot("carried")
    else:
        rows["w_carried"][here] = slot("carried")


def _run_arrays(
    runs: list[Run], devices: int, kind: str, stage: int, owner: int, slots: dict[Value, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(members, slots) of runs whose values, of that kind and stage, are all on one device, the owner."""
    members = np.full((len(runs) + 1, devices), -1)
    places = np.full((len(runs) + 1, devices, devices), -1)
    for number, run in enumerate(runs):
        for member, m in enumerate(run.microbatches):
            members[number, member] = m
            places[number, owner, member] = slots[Value(kind, stage, m)]
    return _narrow(members), _narrow(places)


def _narrow(x: np.ndarray) -> np.ndarray:
    """The numbers as int8, int16 or int32, whichever holds them: they become constants of the program."""
    for dtype in (np.int8, np.int16):
        if np.abs(x).max(initial=0) <= np.iinfo(dtype).max:
            return x.astype(dtype)
    return x.astype(np.int32)
