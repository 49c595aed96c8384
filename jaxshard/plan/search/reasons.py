"""Explain each rank of a search in one sentence: why the first plan wins, and what slows each of the others down."""

from __future__ import annotations

from collections.abc import Sequence

from jaxshard.core.layout import human_bytes
from jaxshard.plan.prediction import human_seconds
from jaxshard.plan.search.ranking import Plan

_WORDS = {
    "compute": "its products",
    "memory_bound": "work that waits for memory",
    "exposed_communication": "communication that products do not cover",
    "bubble": "its schedule's idle time",
    "host": "the host",
}


def reason_for(plan: Plan, plans: Sequence[Plan], usable: int) -> str:
    """Explain the rank of a plan: its time and memory, and how both differ from the best plan's.

    Args:
      plan: the plan.
      plans: all plans, the best first.
      usable: bytes of a device that a program may use.
    """
    best = plans[0]
    where = "by the compiler" if plan.compiled is not None else "estimated"
    memory = f"{human_bytes(plan.peak_bytes)} of {human_bytes(usable)} {where}"
    if plan is best:
        largest = max(plan.parts, key=lambda name: plan.parts[name])
        share = plan.parts[largest] / max(1e-12, sum(plan.parts.values()))
        doubt = "" if plan.fits else ", which only the compiler can confirm"
        what = f"{human_seconds(plan.middle)} a step, of which {_WORDS[largest]} take {share:.0%}"
        return f"{plan.candidate}: {_place(best, plans)}, {what}; {memory}{doubt}."
    slower = plan.middle / best.middle - 1
    pace = f"{slower:.0%} slower" if slower >= 0.005 else "as fast" if slower > -0.005 else f"{-slower:.0%} faster"
    change, worst = max((seconds - best.parts[name], name) for name, seconds in plan.parts.items())
    if slower >= 0.005 and change > 0:
        pace += f", by {_WORDS[worst]} (+{human_seconds(change)})"
    if plan.fits is None:
        return f"{plan.candidate}: {pace}, but {memory} leaves too little room to be sure."
    if less := best.peak_bytes - plan.peak_bytes:
        joint = "but" if (slower > -0.005) != (less < 0) else "and"
        pace += f", {joint} {human_bytes(abs(less))} {'less' if less > 0 else 'more'} than the first"
    return f"{plan.candidate}: {pace}; {memory}."


def _place(best: Plan, plans: Sequence[Plan]) -> str:
    """Explain in words why the best plan is first: it is the fastest, or nearly as fast with less memory."""
    fastest = min((plan for plan in plans if plan.fits is best.fits), key=lambda plan: plan.middle)
    gain = 1 - fastest.middle / best.middle
    if gain < 0.005:
        return "the fastest that fits"
    more = fastest.peak_bytes - best.peak_bytes
    paid = f"{human_bytes(more)} more" if more > 0 else "more axes, names or micro-batches"
    return f"among the fastest that fit (another gains {gain:.0%} for {paid})"
