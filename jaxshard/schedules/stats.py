"""Compute the costs of a schedule: its bubble, and the residuals that devices store between forward and backward.

In lockstep, as `engines/pipeline` runs a table, all devices go through each slot of each tick together: a slot that any
device uses costs its time on all devices. For one_f_one_b(2, 3) with F = 1 and B = 2 (`print` shows the table) the F
slots of ticks 0 to 3 and the B slots of ticks 2 to 5 are used: 4 F + 4 B = 12, of which each device works 3 F + 3 B =
9, so the bubble is 1/4. Asynchronously, with a program per device, each device starts an operation when the previous
one has ended and its inputs have arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jaxshard.schedules.runs import head_runs
from jaxshard.schedules.table import KINDS, Key, Kind, Op, Table


@dataclass(frozen=True)
class Costs:
    """The time that a device needs for one micro-batch, over all chunks of the device, in any unit.

    Attributes:
      F: the time of the forward.
      B: the time of the backward, including the weights' gradients.
      W: the part of B for the weights' gradients, for schedules with separate W operations; half of B by default.

    Example:
        >>> Costs(F=1.0, B=2.0).weights
        1.0
    """

    F: float = 1.0
    B: float = 2.0
    W: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.F < math.inf and 0 < self.B < math.inf and 0 <= self.weights <= self.B):
            raise ValueError(
                f"costs must be finite and above 0, W between 0 and B; got F={self.F}, B={self.B}, W={self.W}"
            )

    @property
    def weights(self) -> float:
        """Return W, the time of the weights' gradients, or half of B if W is not given."""
        return self.B / 2 if self.W is None else self.W

    def of_op(self, kind: Kind, schedule: Table) -> float:
        """Return the time of one operation (F, B or W) on one chunk of a device."""
        weights = self.weights if schedule.splits_backward else 0.0
        all_chunks = {"F": self.F, "B": self.B - weights, "W": weights}[kind]
        return all_chunks / schedule.chunks


@dataclass(frozen=True)
class Stats:
    """Statistics of a schedule, without embedding, head and communication.

    A bubble is the idle fraction of the time from the first operation to the end of the last.

    Attributes:
      ticks: the number of ticks of the table.
      bubble: the bubble if all devices go through each tick together: a slot (F, B or W) that any device uses costs
        its time on all devices.
      bubble_async: the bubble if each device runs its operations in the table's order, as soon as their inputs arrive.
      peak_stash: for each device the largest number of (chunk, micro-batch) pairs whose residuals it stores at the
        same time: from the F of a pair to its B, or to its W if the table has W operations.
      head_runs: the number of runs of the head, each on up to one micro-batch per device.

    Example:
        stats = js.schedules.one_f_one_b(4, 8).stats()
        stats.bubble, stats.peak_stash
    """

    ticks: int
    bubble: float
    bubble_async: float
    peak_stash: tuple[int, ...]
    head_runs: int

    @property
    def facts(self) -> dict[str, str]:
        """The statistics as {name: text} for reports, such as {"ticks": "17"}."""
        return {
            "ticks": str(self.ticks),
            "bubble": f"{self.bubble:.4f} in lockstep, {self.bubble_async:.4f} asynchronously",
            "stash": f"{' '.join(map(str, self.peak_stash))} pairs of chunk and micro-batch at most, per device",
            "head runs": f"{self.head_runs}, each of at most {len(self.peak_stash)} micro-batches",
        }


class Span(NamedTuple):
    """An operation with its start and end time."""

    op: Op
    start: float
    end: float


def compute_stats(schedule: Table, costs: Costs) -> Stats:
    """Compute the statistics of a schedule whose operations take these times."""
    useful = schedule.microbatches * (costs.F + costs.B)
    end = max(span.end for span in lockstep_spans(schedule, costs))
    end_async = max(span.end for span in asynchronous_spans(schedule, costs))
    return Stats(
        ticks=schedule.ticks,
        # Rounding must not make the bubble of a schedule without idle time negative.
        bubble=max(0.0, 1 - useful / end),
        bubble_async=max(0.0, 1 - useful / end_async),
        peak_stash=peak_stash(schedule),
        head_runs=len(head_runs(schedule)),
    )


def lockstep_spans(schedule: Table, costs: Costs) -> list[Span]:
    """Return start and end of every operation if all devices go through the slots (F, B, W) of each tick together."""
    cost = {kind: costs.of_op(kind, schedule) for kind in KINDS}
    spans: list[Span] = []
    end, slot = 0.0, (-1, "")
    for op in schedule.ops:
        if (op.tick, op.kind) != slot:
            slot, end = (op.tick, op.kind), end + cost[op.kind]
        spans.append(Span(op, end - cost[op.kind], end))
    return spans


def asynchronous_spans(schedule: Table, costs: Costs) -> list[Span]:
    """Return start and end of every operation if each device runs its own operations as soon as inputs arrive."""
    cost = {kind: costs.of_op(kind, schedule) for kind in KINDS}
    free = [0.0] * schedule.stages
    done: dict[Key, float] = {}
    spans = []
    # The inputs of an operation come before it in the table.
    for op in schedule.ops:
        start = max([free[op.device], *(done[key] for key in schedule.inputs(op))])
        done[schedule.key(op)] = free[op.device] = start + cost[op.kind]
        spans.append(Span(op, start, start + cost[op.kind]))
    return spans


def peak_stash(schedule: Table) -> tuple[int, ...]:
    """Return for each device the largest number of (chunk, micro-batch) pairs whose residuals it stores at a time."""
    freed_by = "W" if schedule.splits_backward else "B"
    held, peak = [0] * schedule.stages, [0] * schedule.stages
    for op in schedule.ops:
        held[op.device] += (op.kind == "F") - (op.kind == freed_by)  # +1, -1 or 0
        peak[op.device] = max(peak[op.device], held[op.device])
    return tuple(peak)
