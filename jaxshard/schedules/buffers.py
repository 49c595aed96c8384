"""Assign a buffer slot to every value of a schedule while it waits, as rows of small integers, one row per tick.

A value waits on a device between the event that writes it and the last event that reads it. Each device has four
buffers:

    buffer    value                                  written by                        last read by
    inbox     input of a chunk                       arrival, or embed for stage 0     its F
    kept      residuals of a chunk                   F                                 its B
    outbox    output of the last stage               F                                 head, which puts dy in its place
              cotangent dy of a chunk's output       arrival, or head                  its B
              cotangent dx of the model's input      B of stage 0                      embed_grad
    carried   inputs of the weight gradients         B                                 its W

All devices run the same program, so all have buffers of the largest size that any device needs. A device without an
operation in a tick still computes, on arbitrary values; its slot is -1, and nothing is written.

A value takes the lowest slot that is free when it is written. (Lifetimes are intervals, so this needs the fewest slots
possible: the largest number of values that wait at the same time.) For `one_f_one_b(2, 3)`, the micro-batches in the
slots of `kept` during each tick:

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

# The events of a tick, in their order. A time is (tick, event), so times compare in order.
_EMBED, _FORWARD, _HEAD, _BACKWARD, _EMBED_GRAD, _WEIGHTS, _ARRIVAL = range(7)
_Time = tuple[int, int]

_BUFFER_OF = {"input": "inbox", "kept": "kept", "cotangent": "outbox", "result": "outbox", "carried": "carried"}
"""The buffer of each kind of value. The last stage's output and the cotangent that replaces it count as one value."""

_SLOT_COLUMNS = (
    "f_inbox", "f_kept", "f_outbox", "b_outbox", "b_kept", "b_result", "b_carried", "w_carried", "arrive_f", "arrive_b"
)  # fmt: skip


class Value(NamedTuple):
    """An array that a stage keeps for a micro-batch, such as its input; `kind` is a key of `_BUFFER_OF`."""

    kind: str
    stage: int
    microbatch: int


class Lifetime(NamedTuple):
    """The times at which a value is written to a device's buffer and last read; a time is (tick, event in the tick)."""

    device: int
    value: Value
    written: _Time
    last_read: _Time


@dataclass(frozen=True)
class BufferPlan:
    """A schedule together with the buffer slot of every array that waits between two operations.

    Attributes:
      schedule: the table.
      rows: columns of integers by name, [ticks, devices] or, if they are equal for all devices, [ticks]:
        - "f_chunk", "f_microbatch", "b_...", "w_...": the chunk and micro-batch of the operation; micro-batch -1 if
          there is no operation.
        - "f_inbox", "f_kept", "f_outbox", "b_outbox", "b_kept", "b_carried", "b_result", "w_carried": the slots that
          the operation reads and writes, or -1. "b_result" has the cotangent of stage 0's input, which the backward
          pass of the embedding reads.
        - "arrive_f", "arrive_b": the slots for values from neighbours, written at the end of the tick, or -1.
        - "f", "b", "w" [ticks]: 1 if any device has such an operation.
        - "embed", "head", "embed_grad" [ticks]: the index of the run (see `runs`) that is in the tick, or -1.
      runs: for each of "embed", "head" and "embed_grad" a pair of arrays. In a run every device computes the embedding
        or head for a micro-batch of its own.
        - members [runs + 1, devices]: the micro-batch that each device computes in the run, or -1.
        - slots [runs + 1, devices, devices]: in which slot of device i the value of device j's micro-batch is, or -1.
          Only the first device (for "head" the last) has such values.
        The last row of both arrays is for ticks without a run, whose index is -1.
      sizes: the number of slots of each buffer.
    """

    schedule: Schedule
    rows: dict[str, np.ndarray]
    runs: dict[str, tuple[np.ndarray, np.ndarray]]
    sizes: dict[str, int]


def plan_buffers(schedule: Schedule) -> BufferPlan:
    """Plan the buffers of a verified schedule, with the fewest slots possible."""
    runs = {"embed": embed_runs(schedule), "head": head_runs(schedule), "embed_grad": embed_grad_runs(schedule)}
    return _plan(schedule, schedule.ops, runs)


def plan_forward_buffers(schedule: Schedule) -> BufferPlan:
    """Plan the buffers for evaluation, which runs only the forward operations of a schedule."""
    ops = [op for op in schedule.ops if op.kind == "F"]
    runs = {"embed": embed_runs(schedule), "head": output_runs(schedule), "embed_grad": []}
    return _plan(schedule, ops, runs)


def _plan(schedule: Schedule, ops: Sequence[Op], runs: dict[str, list[Run]]) -> BufferPlan:
    slots, sizes = _assign_slots(_lifetimes(schedule, ops, runs))
    ticks, last = ops[-1].tick + 1, schedule.stages * schedule.chunks - 1  # `last` is the index of the last stage
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
    # The kind and stage of the values of a run, and the device that has them.
    p = schedule.stages
    wanted = {"embed": ("input", 0, 0), "head": ("cotangent", last, p - 1), "embed_grad": ("result", 0, 0)}
    arrays = {name: _run_arrays(runs[name], p, *of, slots) for name, of in wanted.items()}
    return BufferPlan(schedule, {name: _narrow(x) for name, x in rows.items()}, arrays, sizes)


def _lifetimes(schedule: Schedule, ops: Sequence[Op], runs: dict[str, list[Run]]) -> Iterator[Lifetime]:
    """Yield the `Lifetime` of every array that is kept in a buffer: the ticks at which it is written and last read."""
    last, split = schedule.stages * schedule.chunks - 1, schedule.splits_backward
    at = {schedule.key(op): op.tick for op in ops}
    tick_of = {name: {m: run.tick for run in these for m in run.microbatches} for name, these in runs.items()}
    for op in ops:
        device, stage, m = op.device, schedule.stage(op), op.microbatch
        if op.kind == "F":
            now = op.tick, _FORWARD
            arrival = (at["F", stage - 1, m], _ARRIVAL) if stage else (tick_of["embed"][m], _EMBED)
            yield Lifetime(device, Value("input", stage, m), arrival, now)
            # Without a B (in evaluation) no residuals are kept, and the last stage's output waits only for the head.
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
    """Give each value the lowest free slot of its buffer; return (slot of each value, number of slots per buffer)."""
    by_buffer = defaultdict(list)
    for device, value, written, last_read in lifetimes:
        by_buffer[device, _BUFFER_OF[value.kind]].append((written, last_read, value))
    slots: dict[Value, int] = {}
    sizes = dict.fromkeys(_BUFFER_OF.values(), 0)
    for (_, buffer), lives in by_buffer.items():
        free_from: list[_Time] = []  # for each slot, the time at which its value is last read
        for written, last_read, value in sorted(lives):
            slot = next((i for i, free in enumerate(free_from) if free <= written), len(free_from))
            # Replaces the slot's time, or appends a slot if none is free.
            free_from[slot : slot + 1] = [last_read]
            slots[value] = slot
        sizes[buffer] = max(sizes[buffer], len(free_from))
    return slots, sizes


def _write_operation(rows: dict[str, np.ndarray], schedule: Schedule, op: Op, slots: dict[Value, int]) -> None:
    """Fill in the entries of one operation in `BufferPlan.rows`, and the slot in which a neighbour gets its result."""
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
    """Return the arrays (members, slots) that `BufferPlan.runs` has for the embedding or the head.

    Args:
      runs: the runs.
      devices: the number of devices.
      kind: the kind of the values that the runs read or write.
      stage: the stage of these values.
      owner: the device that has these values.
      slots: the slot of each value.
    """
    members = np.full((len(runs) + 1, devices), -1)
    places = np.full((len(runs) + 1, devices, devices), -1)
    for number, run in enumerate(runs):
        for member, m in enumerate(run.microbatches):
            members[number, member] = m
            places[number, owner, member] = slots[Value(kind, stage, m)]
    return _narrow(members), _narrow(places)


def _narrow(x: np.ndarray) -> np.ndarray:
    """Convert integers to the smallest of int8, int16 and int32 that holds them, for small constants in a program."""
    for dtype in (np.int8, np.int16):
        if np.abs(x).max(initial=0) <= np.iinfo(dtype).max:
            return x.astype(dtype)
    return x.astype(np.int32)
