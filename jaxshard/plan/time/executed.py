"""Count how often each part of a step runs, in the graph that the estimate of memory uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxshard.plan.memory.graph import Op, Region
from jaxshard.plan.time.pipeline import Ticks
from jaxshard.plan.time.product import device_bytes, product_of

EXCHANGES = {
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""Collectives in a traced program that are promised "as needed", by the names of their primitives."""


def executed(
    region: Region, ticks: Ticks | None = None, times: float = 1.0, shares: Sequence[float] = ()
) -> Iterator[tuple[Region, float]]:
    """Yield a region and the bodies of its loops and branches, each with its number of executions in a step.

    Of a conditional only the branch with the most FLOPs counts. A `while` loop counts once, because its trip count is
    unknown. The exception is the loop that sends tokens to experts in portions of fixed size: it counts as often as it
    runs if all experts get the same number of tokens.

    Args:
      region: a region of the graph of a step.
      ticks: the ticks of a pipeline's program (`ticks_of`), which say how often the conditionals in its loop run.
      times: the number of executions of the region itself.
      shares: for each conditional of the region, in their order, the share of the region's executions in which it
        runs; 1 for conditionals after the last entry.
    """
    yield region, times
    left = list(shares)
    for op in region.ops:
        if op.name == "cond":
            often = times * (left.pop(0) if left else 1.0)
            ways = [list(executed(way, ticks, often)) for way in op.regions]
            yield from max(ways, key=_flops)
            continue
        for body in op.regions:
            yield from executed(body, ticks, times * _iterations(op), _shares(op, ticks))


def _shares(loop: Op, ticks: Ticks | None) -> Sequence[float]:
    """Return the share of ticks in which each conditional of a pipeline's tick loop runs; () for any other loop."""
    conditionals = sum(one.name == "cond" for one in loop.regions[0].ops)
    is_ticks = ticks and (loop.params.get("length"), conditionals) == (ticks.length, len(ticks.shares))
    return ticks.shares if ticks and is_ticks else ()


def _iterations(loop: Op) -> int:
    """Return the number of iterations of a loop: the length of a `scan`, and 1 for a `while`.

    The exception is a `while` that sends tokens to experts in portions: its result is the number of iterations if all
    experts get the same number of tokens.
    """
    if loop.name == "scan":
        return int(loop.params["length"])
    inside = [op for body, _ in executed(loop.regions[0]) for op in body.ops]
    moved = [device_bytes(op.ins[0]) for op in inside if op.name in EXCHANGES]
    rows = [device_bytes(one) for one in loop.outs if len(one.shape) == 2]
    return math.ceil(max(rows) / max(moved)) if rows and moved else 1


def _flops(way: Sequence[tuple[Region, float]]) -> float:
    products = ((product_of(op), times) for region, times in way for op in region.ops)
    return sum(times * product.flops for product, times in products if product is not None)
