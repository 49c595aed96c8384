"""What a schedule costs: its idle time, in lockstep and not, and what devices keep between forward and backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxshard.schedules.runs import head_runs
from jaxshard.schedules.table import KINDS, Key, Kind, Op, Table


@dataclass(frozen=True)
class Costs:
    """Time of a micro-batch on a whole device, all of its chunks, in any unit.

    `B` is the whole backward. Of it `W` are the weights' gradients, half of it by default, where a schedule has them
    apart.
    """

    F: float = 1.0
    B: float = 2.0
    W: float | None = None

    def __post_init__(self) -> None:
        weights = self.B / 2 if self.W is None else self.W
        if not (0 < self.F < float("inf") and 0 < self.B < float("inf") and 0 <= weights <= self.B):
            raise ValueError(
                f"costs must be finite and above 0, W between 0 and B; got F={self.F}, B={self.B}, W={self.W}"
            )

    def of_op(self, kind: Kind, schedule: Table) -> float:
        """Time of one operation, of one chunk."""
        weights = (self.B / 2 if self.W is None else self.W) if schedule.splits_backward else 0.0
        whole = {"F": self.F, "B": self.B - weights, "W": weights}[kind]
        return whole / schedule.chunks


@dataclass(frozen=True)
class Stats:
    """Figures of a schedule; bubbles are idle fractions of the time from the first operation to the end of the last.

    Embedding, head and communication are not in them. `bubble` holds where all devices go through each tick together,
    and a tick costs every slot that any device uses; `bubble_async` where each device runs its own operations in the
    table's order as soon as their inputs are there. `peak_stash` counts, per device, the pairs of chunk and micro-batch
    between their F and the end of their backward; F comes before B before W within a tick. `head_runs` is the number
    of times that the head runs, on up to one micro-batch per device.
    """

    ticks: int
    bubble: float
    bubble_async: float
    peak_stash: tuple[int, ...]
    head_runs: int


class Span(NamedTuple):
    """When an operation runs."""

    op: Op
    start: float
    end: float


def stats_of(schedule: Table, costs: Costs) -> Stats:
    """The figures of a schedule at these costs."""
    useful = schedule.microbatches * (costs.F + costs.B)
    used = Counter(kind for _, kind in {(op.tick, op.kind) for op in schedule.ops})
    lockstep = sum(count * costs.of_op(kind, schedule) for kind, count in used.items())
    end = max(span.end for span in asynchronous(schedule, costs))
    return Stats(
        ticks=schedule.ticks,
        # Rounding must not make a full schedule's bubble negative.
        bubble=max(0.0, 1 - useful / lockstep),
        bubble_async=max(0.0, 1 - useful / end),
        peak_stash=peak_stash(schedule),
        head_runs=len(head_runs(schedule)),
    )


def lockstep(schedule: Table, costs: Costs) -> list[Span]:
    """When each operation runs if all devices go through every slot of every tick together."""
    cost = {kind: costs.of_op(kind, schedule) for kind in KINDS}
    spans: list[Span] = []
    end, slot = 0.0, (-1, "")
    for op in schedule.ops:
        if (op.tick, op.kind) != slot:
            slot, end = (op.tick, op.kind), end + cost[op.kind]
        spans.append(Span(op, end - cost[op.kind], end))
    return spans


def asynchronous(schedule: Table, costs: Costs) -> list[Span]:
    """When each operation runs if every device does its own in the table's order, as soon as their inputs are there."""
    cost = {kind: costs.of_op(kind, schedule) for kind in KINDS}
    free = [0.0] * schedule.stages
    done: dict[Key, float] = {}
    spans = []
    # Whatever an operation needs stands before it in the table.
    for op in schedule.ops:
        start = max([free[op.device], *(done[key] for key in schedule.inputs(op))])
        done[schedule.key(op)] = free[op.device] = start + cost[op.kind]
        spans.append(Span(op, start, start + cost[op.kind]))
    return spans


def peak_stash(schedule: Table) -> tuple[int, ...]:
    """Per device the largest number of pairs of chunk and micro-batch that wait for the end of their backward."""
    freed_by = "W" if schedule.splits_backward else "B"
    held, peak = [0] * schedule.stages, [0] * schedule.stages
    for op in schedule.ops:
        held[op.device] += (op.kind == "F") - (op.kind == freed_by)
        peak[op.device] = max(peak[op.device], held[op.device])
    return tuple(peak)
