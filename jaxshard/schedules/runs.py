"""Determine when embedding and head run: on up to p micro-batches at once, one per device of the pipeline.

Embedding and head belong to no stage. All devices run the same program, so when one device computes them, all do. So
they run on several micro-batches at once (a run), one per device. For one_f_one_b(2, 3):

    tick          0 1 2 3 4 5      embed_runs       tick 0 (0, 1), tick 2 (2)     before its first forward
    device 0 F    0 1 2            head_runs        tick 2 (0, 1), tick 3 (2)     after its last forward
             B          0 1 2      embed_grad_runs  tick 4 (0, 1), tick 5 (2)     after its last backward
    device 1 F      0 1 2
             B        0 1 2        The B of 0 in tick 2 needs the head's result of the same tick, so the head can't wait
                                   for micro-batch 2: a run ends early if a backward needs one of its members.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxshard.schedules.table import Kind, Op, Table


class Run(NamedTuple):
    """A run of embedding or head: a tick in which each device computes it for a micro-batch of its own.

    Attributes:
      tick: the tick of the run.
      microbatches: its micro-batches, at most one per device, in the order of their operations.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.head_runs(js.schedules.gpipe(2, 2))]
    """

    tick: int
    microbatches: tuple[int, ...]


def head_runs(schedule: Table) -> list[Run]:
    """Return the runs of the head, which compute losses and their gradients, between the F and B slots of a tick.

    A run collects forwards of the last stage in the order of ticks until it has one per device, or until the next
    forward would come after the backward of a member. Its tick is that of its last forward.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.head_runs(js.schedules.gpipe(2, 2))]
    """
    last = schedule.stages * schedule.chunks - 1
    backward = {op.microbatch: op.tick for op in _of_stage(schedule, "B", last)}
    runs: list[list[Op]] = []
    limit = -1
    for op in _of_stage(schedule, "F", last):
        if op.tick > limit or len(runs[-1]) == schedule.stages:
            runs.append([])
            limit = backward[op.microbatch]
        # No member's backward may come before the run, so the run ends at the earliest backward of its members.
        runs[-1].append(op)
        limit = min(limit, backward[op.microbatch])
    return [Run(run[-1].tick, _members(run)) for run in runs]


def output_runs(schedule: Table) -> list[Run]:
    """Return the runs of the head in evaluation, which has no backwards: each in the tick of its last forward."""
    last = schedule.stages * schedule.chunks - 1
    return [Run(run[-1].tick, _members(run)) for run in _in_runs(schedule, "F", last)]


def embed_runs(schedule: Table) -> list[Run]:
    """Return the runs that compute the inputs of stage 0, before the F slot: each in the tick of its first forward.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.embed_runs(js.schedules.gpipe(2, 2))]
    """
    return [Run(run[0].tick, _members(run)) for run in _in_runs(schedule, "F")]


def embed_grad_runs(schedule: Table) -> list[Run]:
    """Return the runs of the embedding's backward pass, after the B slot: each in the tick of its last B.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.embed_grad_runs(js.schedules.gpipe(2, 2))]
    """
    return [Run(run[-1].tick, _members(run)) for run in _in_runs(schedule, "B")]


def _of_stage(schedule: Table, kind: Kind, stage: int) -> Iterator[Op]:
    return (op for op in schedule.ops if op.kind == kind and schedule.stage(op) == stage)


def _in_runs(schedule: Table, kind: Kind, stage: int = 0) -> list[list[Op]]:
    ops = list(_of_stage(schedule, kind, stage))
    return [ops[i : i + schedule.stages] for i in range(0, len(ops), schedule.stages)]


def _members(run: list[Op]) -> tuple[int, ...]:
    return tuple(op.microbatch for op in run)
