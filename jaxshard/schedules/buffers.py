"""A schedule as rows of small numbers, one per tick: which device works on what, in which slot of which buffer.

Every device has four rings of slots: `inbox` (activations that wait for their F), `kept` (what an F leaves for its B),
`outbox` (outputs that wait for the loss and gradients that wait for their B, or for the embedding's) and `carried`
(what a B leaves for its W). A slot is taken from when a value is written until it is read for the last time; the
rings are as long as the device that needs most, and one slot longer: the last is where what nobody needs goes.
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

Rows = np.ndarray
"""Small integers [ticks, devices], or [ticks] where all devices do alike."""

# What happens in a tick, in this order.
_EMBED, _FORWARD, _HEAD, _BACKWARD, _EMBED_GRAD, _WEIGHTS, _ARRIVAL = range(7)


class Value(NamedTuple):
    """A value in a ring: of which ring, stage and micro-batch."""

    ring: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Slots:
    """The rows of a schedule.

    `rows[name]` are, per tick and device: chunk and microbatch of each operation ("f_chunk", "f_microbatch", ...; -1
    for no operation in microbatch), slots where it reads and writes ("f_inbox", "f_kept", "f_outbox", "b_outbox",
    "b_kept", "b_carried", "b_result", "w_carried") and where what arrives at the end of the tick goes ("arrive_f",
    "arrive_b"). `rows["f"]`, `["b"]`, `["w"]`, per tick, say whether any device has such an operation, and
    `rows["embed"]`, `["head"]`, `["embed_grad"]` which run happens in it (-1: none). `runs[name]` are, per run, each
    device's micro-batch (-1: none) and [.., devices, devices] the slot of a device for the piece of each device.
    `sizes` are the lengths of the rings, the last slot included.
    """

    schedule: Schedule
    rows: dict[str, Rows]
    runs: dict[str, tuple[np.ndarray, np.ndarray]]
    sizes: dict[str, int]


def slots_of(schedule: Schedule) -> Slots:
    """The rows of a verified schedule, every ring as short as can be."""
    events = {"embed": embed_runs(schedule), "head": head_runs(schedule), "embed_grad": embed_grad_runs(schedule)}
    return _slots(schedule, schedule.ops, events)


def forward_slots(schedule: Schedule) -> Slots:
    """The rows of a schedule's forwards alone: what evaluation runs."""
    ops = [op for op in schedule.ops if op.kind == "F"]
    events = {"embed": embed_runs(schedule), "head": output_runs(schedule), "embed_grad": []}
    return _slots(schedule, ops, events)


def _slots(schedule: Schedule, ops: Sequence[Op], events: dict[str, list[Run]]) -> Slots:
    places, sizes = _placed(schedule, ops, events)
    trash = {ring: size - 1 for ring, size in sizes.items()}
    ticks = ops[-1].tick + 1
    rows = _empty_rows(ticks, schedule.stages, trash)
    for op in ops:
        _fill(rows, schedule, op, places)
    for name, runs in events.items():
        rows[name] = np.full(ticks, -1)
        for number, run in enumerate(runs):
            rows[name][run.tick] = number
    last = schedule.stages * schedule.chunks - 1
    wanted = {"embed": ("inbox", 0, 0), "head": ("outbox", last, schedule.stages - 1), "embed_grad": ("result", 0, 0)}
    made = {name: _run_rows(schedule, events[name], *wanted[name], places, trash) for name in events}
    return Slots(schedule, {name: _small(x) for name, x in rows.items()}, made, sizes)


def _lifetimes(
    schedule: Schedule, ops: Sequence[Op], events: dict[str, list[Run]]
) -> Iterator[tuple[int, Value, tuple[int, int], tuple[int, int]]]:
    """(device, value, when it is written, when it is read for the last time); a time is (tick, place in the tick)."""
    last, split = schedule.stages * schedule.chunks - 1, schedule.splits_backward
    at = {schedule.key(op): op.tick for op in ops}
    tick_of = {name: {m: run.tick for run in runs for m in run.microbatches} for name, runs in events.items()}
    for op in ops:
        stage, m, device = schedule.stage(op), op.microbatch, op.device
        if op.kind == "F":
            born = (at["F", stage - 1, m], _ARRIVAL) if stage else (tick_of["embed"][m], _EMBED)
            yield device, Value("inbox", stage, m), born, (op.tick, _FORWARD)
            if ("B", stage, m) in at:
                yield device, Value("kept", stage, m), (op.tick, _FORWARD), (at["B", stage, m], _BACKWARD)
            elif stage == last:
                yield device, Value("outbox", stage, m), (op.tick, _FORWARD), (tick_of["head"][m], _HEAD)
        if op.kind == "B":
            born = (at["F", stage, m], _FORWARD) if stage == last else (at["B", stage + 1, m], _ARRIVAL)
            yield device, Value("outbox", stage, m), born, (op.tick, _BACKWARD)
            if stage == 0:
                yield device, Value("result", stage, m), (op.tick, _BACKWARD), (tick_of["embed_grad"][m], _EMBED_GRAD)
            if split:
                yield device, Value("carried", stage, m), (op.tick, _BACKWARD), (at["W", stage, m], _WEIGHTS)


def _placed(
    schedule: Schedule, ops: Sequence[Op], events: dict[str, list[Run]]
) -> tuple[dict[Value, int], dict[str, int]]:
    """The slot of every value, and the sizes of the rings; slots are taken first come, first served."""
    ring_of = {"inbox": "inbox", "kept": "kept", "outbox": "outbox", "result": "outbox", "carried": "carried"}
    by_ring = defaultdict(list)
    for device, value, born, dead in _lifetimes(schedule, ops, events):
        by_ring[device, ring_of[value.ring]].append((born, dead, value))
    places: dict[Value, int] = {}
    sizes = dict.fromkeys(ring_of.values(), 1)
    for (_, ring), lives in by_ring.items():
        free_from: list[tuple[int, int]] = []
        for born, dead, value in sorted(lives):
            slot = next((i for i, free in enumerate(free_from) if free <= born), len(free_from))
            free_from[slot : slot + 1] = [dead]
            places[value] = slot
        sizes[ring] = max(sizes[ring], len(free_from) + 1)
    return places, sizes


def _empty_rows(ticks: int, stages: int, trash: dict[str, int]) -> dict[str, Rows]:
    def full(value: int) -> Rows:
        return np.full((ticks, stages), value)

    rows = {f"{kind}_chunk": full(0) for kind in "fbw"}
    rows |= {f"{kind}_microbatch": full(-1) for kind in "fbw"}
    rows |= {name: full(trash[ring]) for name, ring in _RINGS.items()}
    rows |= {kind: np.zeros(ticks, int) for kind in "fbw"}
    return rows


_RINGS = {
    "f_inbox": "inbox",
    "f_kept": "kept",
    "f_outbox": "outbox",
    "b_outbox": "outbox",
    "b_kept": "kept",
    "b_result": "outbox",
    "b_carried": "carried",
    "w_carried": "carried",
    "arrive_f": "inbox",
    "arrive_b": "outbox",
}


def _fill(rows: dict[str, Rows], schedule: Schedule, op: Op, places: dict[Value, int]) -> None:
    """Writes one operation into its tick: its own numbers, and the arrival at its neighbour."""
    stage, m, last = schedule.stage(op), op.microbatch, schedule.stages * schedule.chunks - 1
    kind = op.kind.lower()
    here = op.tick, op.device
    rows[kind][op.tick] = 1
    rows[f"{kind}_chunk"][here] = op.chunk
    rows[f"{kind}_microbatch"][here] = m
    if op.kind == "F":
        rows["f_inbox"][here] = places[Value("inbox", stage, m)]
        if (kept := Value("kept", stage, m)) in places:
            rows["f_kept"][here] = places[kept]
        if stage == last:
            rows["f_outbox"][here] = places[Value("outbox", stage, m)]
        else:
            rows["arrive_f"][op.tick, (op.device + 1) % schedule.stages] = places[Value("inbox", stage + 1, m)]
    elif op.kind == "B":
        rows["b_outbox"][here] = places[Value("outbox", stage, m)]
        rows["b_kept"][here] = places[Value("kept", stage, m)]
        if stage == 0:
            rows["b_result"][here] = places[Value("result", stage, m)]
        else:
            rows["arrive_b"][op.tick, (op.device - 1) % schedule.stages] = places[Value("outbox", stage - 1, m)]
        if schedule.splits_backward:
            rows["b_carried"][here] = places[Value("carried", stage, m)]
    else:
        rows["w_carried"][here] = places[Value("carried", stage, m)]


def _run_rows(
    schedule: Schedule, runs: Iterable[Run], ring: str, stage: int, device: int, places: dict[Value, int],
    trash: dict[str, int],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    runs = list(runs)
    p = schedule.stages
    members = np.full((len(runs), p), -1)
    slots = np.full((len(runs), p, p), trash["outbox" if ring == "result" else ring])
    for number, run in enumerate(runs):
        for piece, m in enumerate(run.microbatches):
            members[number, piece] = m
            slots[number, device, piece] = places[Value(ring, stage, m)]
    return _small(members), _small(slots)


def _small(x: np.ndarray) -> np.ndarray:
    """The narrowest of int8, int16 and int32 that holds the numbers: they become constants of the program."""
    for dtype in (np.int8, np.int16):
        if np.abs(x).max(initial=0) <= np.iinfo(dtype).max:
            return x.astype(dtype)
    return x.astype(np.int32)
