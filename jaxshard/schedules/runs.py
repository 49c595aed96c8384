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
    """A run of the embedding or the head: in one tick, each device computes it for a micro-batch of its own.

    Attributes:
      tick: the tick of the run.
      microbatches: its micro-batches, at most one per device, in the order of their operations.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.head_runs(js.schedules.gpipe(2, 2))]
    """

    tick: int
    microbatches: tuple[int, ...]


def head_runs(schedule: Table) -> list[Run]:
    """Return the runs of the head, each of which computes the losses of several micro-batches and their gradients.

    A run has micro-batches in the order in which the last stage finishes their forwards, up to one per device. A run
    ends earlier if the backward of one of its micro-batches needs its result. It takes place in the tick of the last
    forward of its micro-batches, between the F slot and the B slot.

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
    """Return the runs of the head in evaluation, each for up to p micro-batches, in the tick of the last forward."""
    last = schedule.stages * schedule.chunks - 1
    return [Run(run[-1].tick, _members(run)) for run in _in_runs(schedule, "F", last)]


def embed_runs(schedule: Table) -> list[Run]:
    """Return the runs of the embedding, each of which computes the input of stage 0 for up to p micro-batches.

    There are p devices, each with one of these micro-batches. A run takes place in the tick of the first forward of its
    micro-batches, before the F slot.

    Example:
        [(run.tick, run.microbatches) for run in js.schedules.embed_runs(js.schedules.gpipe(2, 2))]
    """
    return [Run(run[0].tick, _members(run)) for run in _in_runs(schedule, "F")]


def embed_grad_runs(schedule: Table) -> list[Run]:
    """Return the runs of the embedding's backward pass, each for up to one micro-batch per device.

    A run takes place in the tick of the last stage 0 backward of its micro-batches, after the B slot.

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
