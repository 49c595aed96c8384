"""The ticks of a pipeline: how often each event of the tick loop runs, and how long devices idle.

The loop (`engines/pipeline/tick_loop.py`) has a conditional for each event. In a tick all devices run it, or none, and
those with nothing to do compute on whatever there is. So the program's products, counted by events, are useful work and
bubble together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxshard.core.layout import Layout
from jaxshard.engines.engine import Engine
from jaxshard.schedules.buffers import plan_buffers
from jaxshard.schedules.stats import Costs, compute_stats


class Ticks(NamedTuple):
    """The loop over the ticks of a schedule.

    Attributes:
      turns: how many the loop has.
      shares: for each conditional in its body, in their order, the share of the turns in which it runs.
    """

    turns: int
    shares: tuple[float, ...]


def ticks_of(engine: Engine, layout: Layout) -> Ticks | None:
    """Return the tick loop of an engine's schedule; None for engines without one."""
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
    """Return the idle share of an engine's schedule, in lockstep; 0 for engines without one.

    A backward pass that keeps only what goes into its blocks computes their forward pass again: it costs three times
    the forward.
    """
    table = getattr(engine, "table", None)
    if table is None:
        return 0.0
    again = getattr(engine, "stash", None) in ("layer", "stage")
    return compute_stats(table(layout), Costs(F=1.0, B=3.0 if again else 2.0)).bubble
