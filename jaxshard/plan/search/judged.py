"""Ask the compiler about the best plans of a search, and keep those that fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.search.ranking import Plan

_AT_ONCE = 4
"""The most compilers that run at once; each takes up to 0.9 GB."""


def judged(
    plans: Sequence[Plan],
    wanted: int,
    judge: Callable[[Plan], Verdict],
    order: Callable[[Plan], Any],
    progress: Callable[[str], None],
) -> list[Plan]:
    """Ask the compiler about the best plans until enough of them fit.

    Left out are plans that do not fit, and plans for which the compiler fails with an error.

    Args:
      plans: the estimated plans.
      wanted: the number of fitting plans to find.
      judge: compiles a plan, and returns the compiler's verdict.
      order: returns the key by which plans are ranked, the smallest first.
      progress: a function that is called with a message, such as how many plans are compiled.

    Returns:
      The plans that fit, ranked, then the plans that the compiler was not asked about.
    """
    fitting: list[Plan] = []
    # By time and memory alone: the compiler tells which plans fit.
    rest = sorted(plans, key=lambda plan: order(plan)[1:])
    asked = 0
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        while rest and len(fitting) < wanted:
            now = distinct(rest)[: wanted - len(fitting)]
            rest = [plan for plan in rest if plan not in now]
            asked += len(now)
            progress(f"asking the compiler about plan {asked} of at most {len(plans)}")
            for plan, verdict in zip(now, pool.map(partial(_verdict, judge), now), strict=True):
                if verdict is not None and verdict.fits is not False:
                    fitting.append(replace(plan, compiled=verdict))
            # Leave out slower remat policies of a layout that fits.
            rest = [plan for plan in rest if all(layout_of(plan) != layout_of(one) for one in fitting)]
    return [*sorted(fitting, key=order), *sorted(rest, key=order)]


def _verdict(judge: Callable[[Plan], Verdict], plan: Plan) -> Verdict | None:
    """Compile a plan and return the verdict; None if the compiler fails with an error."""
    try:
        return judge(plan)
    except (RuntimeError, TimeoutError):
        return None


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans without repeated layouts: of plans that differ only in their remat policies, keep the first."""
    found: dict[Any, Plan] = {}
    for plan in plans:
        found.setdefault(layout_of(plan), plan)
    return list(found.values())


def layout_of(plan: Plan) -> Any:
    """Return the candidate of a plan without its remat policy; equal results mean that only the policies differ."""
    return replace(plan.candidate, policy=None)
