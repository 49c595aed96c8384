"""The rows of a schedule, replayed by a machine that shares nothing with the package: every read finds what it needs.

In a tick: embeddings of a run arrive at the first device, forwards, losses of a run, backwards, the embeddings'
gradients, weight gradients, and what was sent arrives. All devices do every event that any of them does; one without
an operation there makes rubbish, for which it has no slot.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.schedules import Schedule, named
from jaxshard.schedules.buffers import BufferPlan, plan_buffers
from tests.schedules.tables import make, schedules

RUBBISH = ("rubbish", -1, -1)


class Machine:
    """Rings of tokens (what, stage, micro-batch) per device, and when each token is written and read."""

    def __init__(self, plan: BufferPlan):
        self.plan, self.p = plan, plan.schedule.stages
        self.last = self.p * plan.schedule.chunks - 1
        self.rings = {ring: [[RUBBISH] * size for _ in range(self.p)] for ring, size in plan.sizes.items()}
        self.time = 0
        self.lives: dict[tuple, list[int]] = {}
        self.done: list[tuple] = []

    def write(self, ring, device, slot, token):
        """Over nothing that is still needed, which the reads show."""
        assert -1 <= slot < self.plan.sizes[ring]
        if token == RUBBISH:
            assert slot == -1
        else:
            assert slot >= 0
            self.rings[ring][device][slot] = token
            self.lives[ring, device, token] = [self.time, self.time]

    def read(self, ring, device, slot, token):
        assert slot >= 0
        assert self.rings[ring][device][slot] == token, (ring, device, slot, self.time)
        self.lives[ring, device, token][1] = self.time

    def row(self, name, tick, device):
        return int(self.plan.rows[name][tick, device])

    def operation(self, kind, tick, device):
        """(stage, micro-batch) or None."""
        m = self.row(f"{kind}_microbatch", tick, device)
        if m < 0:
            return None
        self.done.append((kind, stage := self.row(f"{kind}_chunk", tick, device) * self.p + device, m))
        return stage, m

    def run(self, name, tick, device):
        """(piece, micro-batch, slot) of a run on the device that has all of its pieces, and the slots of the others."""
        number = int(self.plan.rows[name][tick])
        if number < 0:
            return []
        members, places = (x[number] for x in self.plan.runs[name])
        self.done += [(name, m) for m in members.tolist() if m >= 0]
        ring = "inbox" if name == "embed" else "outbox"
        for other in range(self.p):
            for piece in range(self.p):
                if name != "embed_grad" and (other != device or members[piece] < 0):
                    self.write(ring, other, int(places[other, piece]), RUBBISH)
        return [(m, int(places[device, i])) for i, m in enumerate(members.tolist()) if m >= 0]

    def tick(self, tick):
        p, last, split = self.p, self.last, self.plan.schedule.splits_backward
        busy = {kind: bool(self.plan.rows[kind][tick]) for kind in "fbw"}
        sent_y, sent_dx = [RUBBISH] * p, [RUBBISH] * p
        for m, slot in self.run("embed", tick, 0):
            self.write("inbox", 0, slot, ("x", 0, m))
        self.time += 1
        for device in range(p):
            op = self.operation("f", tick, device)
            assert busy["f"] or op is None
            kept = y = RUBBISH
            if op:
                self.read("inbox", device, self.row("f_inbox", tick, device), ("x", *op))
                kept, y = ("kept", *op), ("y", *op)
                sent_y[device] = ("x", op[0] + 1, op[1]) if op[0] < last else RUBBISH
            if busy["f"]:
                self.write("kept", device, self.row("f_kept", tick, device), kept)
                # An output is kept where the loss is computed; elsewhere it has been sent.
                y = y if op and op[0] == last else RUBBISH
                self.write("outbox", device, self.row("f_outbox", tick, device), y)
        self.time += 1
        for m, slot in self.run("head", tick, p - 1):
            self.read("outbox", p - 1, slot, ("y", last, m))
            self.write("outbox", p - 1, slot, ("dy", last, m))
        self.time += 1
        for device in range(p):
            op = self.operation("b", tick, device)
            assert busy["b"] or op is None
            carried = dx = RUBBISH
            if op:
                self.read("kept", device, self.row("b_kept", tick, device), ("kept", *op))
                self.read("outbox", device, self.row("b_outbox", tick, device), ("dy", *op))
                carried, dx = ("carried", *op), ("dx", *op) if op[0] == 0 else RUBBISH
                sent_dx[device] = ("dy", op[0] - 1, op[1]) if op[0] else RUBBISH
            if busy["b"]:
                self.write("outbox", device, self.row("b_result", tick, device), dx)
                if split:
                    self.write("carried", device, self.row("b_carried", tick, device), carried)
        self.time += 1
        for m, slot in self.run("embed_grad", tick, 0):
            self.read("outbox", 0, slot, ("dx", 0, m))
        self.time += 1
        for device in range(p):
            op = self.operation("w", tick, device)
            assert (busy["w"] and split) or op is None
            if op:
                self.read("carried", device, self.row("w_carried", tick, device), ("carried", *op))
        self.time += 1
        for device in range(p):
            self.write("inbox", device, self.row("arrive_f", tick, device), sent_y[(device - 1) % p])
            self.write("outbox", device, self.row("arrive_b", tick, device), sent_dx[(device + 1) % p])
        self.time += 1

    def longest(self, ring):
        """The most tokens that one device needs at once; what is read and written in the same event share a slot."""
        most = 0
        for device in range(self.p):
            mine = [life for (r, d, _), life in self._joined().items() if (r, d) == (ring, device)]
            starts = [start for start, _ in mine]
            most = max([most, *(sum(a <= time and (b > time or a == time) for a, b in mine) for time in starts)])
        return most

    def _joined(self):
        """An output and the cotangent that takes its place are one."""
        lives = {}
        for (ring, device, token), (start, end) in self.lives.items():
            what = ("y" if token[0] == "dy" and token[1] == self.last else token[0], *token[1:])
            old = lives.get((ring, device, what), [start, end])
            lives[ring, device, what] = [min(start, old[0]), max(end, old[1])]
        return lives


def check(schedule: Schedule) -> Machine:
    plan = plan_buffers(schedule)
    assert all(len(row) == schedule.ticks for row in plan.rows.values())
    machine = Machine(plan)
    for tick in range(schedule.ticks):
        machine.tick(tick)
    p, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    kinds = "fbw" if schedule.splits_backward else "fb"
    expected = [(kind, stage, i) for kind in kinds for stage in range(p * v) for i in range(m)]
    expected += [(name, i) for name in ("embed", "head", "embed_grad") for i in range(m)]
    assert sorted(machine.done, key=str) == sorted(expected, key=str)
    for ring, size in plan.sizes.items():
        assert size == machine.longest(ring), ring
    return machine


@st.composite
def delayed(draw):
    """A named schedule whose operations come later by up to three ticks each, in another order then, and legally."""
    base = draw(schedules(p=4, v=3, m=7))
    p, last = base.stages, base.stages * base.chunks - 1
    late = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    at, taken = {}, set()
    for number, op in enumerate(base.ops):
        stage, m = base.stage(op), op.microbatch
        needs = {
            "F": at.get(("F", stage - 1, m), -1) + 1,
            "B": at.get(("F", stage, m), 0) if stage == last else at.get(("B", stage + 1, m), 0) + 1,
            "W": at.get(("B", stage, m), 0),
        }
        tick = max(op.tick, needs[op.kind]) + late[number % len(late)]
        while (tick, op.device, op.kind) in taken:
            tick += 1
        taken.add((tick, op.device, op.kind))
        at[op.kind, stage, m] = tick
    dense = {tick: i for i, tick in enumerate(sorted(set(at.values())))}
    ops = tuple(op._replace(tick=dense[at[base.key(op)]]) for op in base.ops)
    return Schedule("delayed", p, base.microbatches, base.chunks, ops)


@given(schedule=schedules(p=6, v=3))
@settings(max_examples=16, deadline=None)
def test_named_schedules_find_what_they_need(schedule):
    check(schedule)


@given(schedule=delayed())
@settings(max_examples=24, deadline=None)
def test_delayed_tables_find_what_they_need(schedule):
    check(schedule)


# Devices p, micro-batches m, chunks v, and the slots of (inbox, kept, outbox, carried). Kept are D + p,
# D the tick of the first backward: 6 or 10. The W of the last device waits for 3 ticks.
SIZES = [
    ("gpipe", 4, 16, 1, (4, 16, 16, 0)),
    ("one_f_one_b", 4, 16, 1, (4, 10, 4, 0)),
    ("interleaved", 4, 16, 2, (4, 14, 4, 0)),
    ("zero_bubble", 4, 16, 2, (4, 14, 4, 4)),
]


@pytest.mark.parametrize(("name", "p", "m", "v", "expected"), SIZES)
def test_sizes_do_not_grow_with_micro_batches(name, p, m, v, expected):
    """But for gpipe."""
    few, many = (plan_buffers(make(name, p, count, v)).sizes for count in (m, 8 * m))
    assert tuple(few[ring] for ring in ("inbox", "kept", "outbox", "carried")) == expected
    if name != "gpipe":
        assert few == many


def test_numbers_are_small():
    plan = plan_buffers(named("interleaved", 4, 64, chunks=2))
    arrays = [*plan.rows.values(), *(x for pair in plan.runs.values() for x in pair)]
    assert {x.dtype for x in arrays} == {np.dtype(np.int8)}
    assert plan_buffers(named("gpipe", 2, 200)).rows["f_microbatch"].dtype == np.int16
