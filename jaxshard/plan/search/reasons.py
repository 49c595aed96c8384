"""One sentence for each plan of a ranking: why the first is first, and what holds each of the others back."""

from __future__ import annotations

from jaxshard.core.layout import human_bytes
from jaxshard.plan.search.ranking import Plan

_WORDS = {
    "compute": "its products",
    "memory_bound": "work that waits for memory",
    "exposed_communication": "communication that products do not cover",
    "between": "communication between products",
    "weights": "weights and gradients on their way",
    "bubble": "its schedule's idle time",
    "idle": "its schedule's idle time",
    "update": "the update",
    "host": "the host",
}


def reason_for(plan: Plan, best: Plan, usable: int | None) -> str:
    """Write the sentence for a plan.

    Args:
      plan: which one.
      best: the first of the ranking; the same for its own sentence.
      usable: bytes of a device that a program may use.
    """
    where = "compiled" if plan.compiled is not None else "predicted"
    room = "" if usable is None else f" of {human_bytes(usable)}"
    memory = f"{human_bytes(plan.peak_bytes)}{room} {where}"
    if plan is best:
        largest = max(plan.parts, key=lambda name: plan.parts[name])
        share = plan.parts[largest] / max(1e-12, sum(plan.parts.values()))
        doubt = "" if plan.fits else ", which only the compiler can confirm"
        what = f"{plan.middle:.3g} s a step, of which {_WORDS.get(largest, largest)} take {share:.0%}"
        return f"{plan.candidate}: the fastest that fits, {what}; {memory}{doubt}."
    slower = plan.middle / best.middle - 1
    pace = f"{slower:.0%} slower" if slower >= 0.005 else "as fast" if slower > -0.005 else f"{-slower:.0%} faster"
    change = {name: plan.parts[name] - best.parts.get(name, 0.0) for name in plan.parts}
    worst = max(change, key=lambda name: change[name])
    cause = f", by {_WORDS.get(worst, worst)} (+{change[worst]:.2g} s)" if slower >= 0.005 and change[worst] > 0 else ""
    if plan.fits is None:
        return f"{plan.candidate}: {pace}{cause}, but {memory} leaves too little room to be sure; compile it."
    less = best.peak_bytes - plan.peak_bytes
    beside = f", {human_bytes(abs(less))} {'less' if less > 0 else 'more'} than the first" if less else ""
    return f"{plan.candidate}: {pace}{cause}; {memory}{beside}."
