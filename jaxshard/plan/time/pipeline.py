"""Count the ticks of a pipeline: how often each event of the tick loop runs, and how long devices idle.

The loop (`engines/pipeline/tick_loop.py`) has a conditional for each event, such as a block's forward pass. In a tick
either all devices run an event or none, and devices without work compute on placeholder data. So the matrix products of
the program include the idle time of the pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxshard.core.layout import Layout
from jaxshard.engines.engine import Engine
from jaxshard.schedules.buffers import plan_buffers
from jaxshard.schedules.stats import Costs, compute_stats


class Ticks(NamedTuple):
    """The number of ticks (iterations) of a pipeline's loop, and how often its conditionals run.

    Attributes:
      length: the number of ticks.
      shares: for each conditional in the loop's body, in their order, the share of the ticks in which it runs.
    """

    length: int
    shares: tuple[float, ...]


def ticks_of(engine: Engine, layout: Layout) -> Ticks | None:
    """Count the ticks of an engine's pipeline schedule; None for an engine without a schedule."""
    table = getattr(engine, "table", None)
    if table is None:
        return None
    schedule = table(layout)
    rows = plan_buffers(schedule).rows
    # In the order of `_TickLoop.tick`; runs are numbered from 0, operations are 1.
    events = [rows["embed"] >= 0, rows["f"] > 0, rows["head"] >= 0, rows["b"] > 0, rows["embed_grad"] >= 0]
    if schedule.splits_backward:
        events.append(rows["w"] > 0)
    return Ticks(len(rows["f"]), tuple(float(np.mean(one)) for one in events))


def bubble_of(engine: Engine, layout: Layout) -> float:
    """Return the share of time in which devices idle under an engine's schedule; 0 for an engine without a schedule.

    In each tick all devices wait for the slowest. A backward pass costs twice as much as a forward pass, and three
    times as much if only the inputs of blocks are kept, because it then recomputes the forward pass.
    """
    table = getattr(engine, "table", None)
    if table is None:
        return 0.0
    again = getattr(engine, "stash", None) in ("layer", "stage")
    return compute_stats(table(layout), Costs(F=1.0, B=3.0 if again else 2.0)).bubble
