"""Extrapolate the memory of a step whose blocks run in a Python loop, from two compilations with few blocks.

The compile time of such a program grows with the depth of the model. Its memory grows by the same bytes with each
block, so two small depths are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax

from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.training.step import Step

SMALL, LARGER = 2, 4
"""The numbers of blocks with which a step is compiled for an extrapolation."""
FROM = 32
"""The number of blocks above which a step is extrapolated."""


def extrapolate(ask: Callable[[Step], Verdict], step: Step, at_depth: Callable[[int], Step]) -> Verdict | None:
    """Extrapolate the memory of a step from the same step with 2 and 4 blocks.

    Args:
      ask: compiles a step and returns its verdict.
      step: the step of full depth.
      at_depth: makes the step with a given number of blocks.

    Returns:
      The extrapolated verdict; None if the step has at most 32 blocks, or is refused even with 2 or 4 blocks.

    Raises:
      ValueError: the numbers of parameters at 2 and 4 blocks do not extrapolate to the number in `step`, so `at_depth`
        does not make the same model.
    """
    small, larger = at_depth(SMALL), at_depth(LARGER)
    depth = _depth(*(_count(one) for one in (small, larger, step)))
    if depth <= FROM:
        return None
    low, high = ask(small), ask(larger)
    if low.refusal or high.refusal:
        return None
    times = (depth - SMALL) / (LARGER - SMALL)

    def at(first: int, second: int) -> int:
        return max(0, round(first + times * (second - first)))

    few, more = ({replace(one, bytes=0, count=0): one for one in verdict.arrays} for verdict in (low, high))
    arrays = []
    for one in dict.fromkeys((*few, *more)):
        first, second = few.get(one, one), more.get(one, one)
        arrays.append(replace(one, bytes=at(first.bytes, second.bytes), count=at(first.count, second.count)))
    return replace(
        high,
        step=step,
        text="",  # the program is that of another depth
        judged_by="extrapolated",
        live_bytes=at(low.live_bytes, high.live_bytes),
        allocated_bytes=at(low.allocated_bytes or 0, high.allocated_bytes or 0),
        argument_bytes=at(low.argument_bytes, high.argument_bytes),
        arrays=tuple(sorted((one for one in arrays if one.bytes), key=lambda one: -one.bytes)),
        compile_seconds=low.compile_seconds + high.compile_seconds,
    )


def _count(step: Step) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(step.layout.shapes.params))


def _depth(small: int, larger: int, full: int) -> int:
    block = (larger - small) / (LARGER - SMALL)
    depth = SMALL + (full - small) / block if block else 0.0
    if depth != int(depth) or depth < SMALL:
        raise ValueError(
            f"at_depth({SMALL}) has {small:,} parameters and at_depth({LARGER}) {larger:,}, from which no whole number "
            f"of blocks leads to the {full:,} of the step; at_depth(n) must make the same step with n blocks"
        )
    return int(depth)
