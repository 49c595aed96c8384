"""The memory that a compiler assigned to a step, in two figures and by arrays."""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.core.layout import Layout
from jaxshard.plan.compiled.judge import Answer
from jaxshard.plan.compiled.live import LiveArray, live_arrays, moment_words
from jaxshard.plan.compiled.refusal import parse_refusal


class Memory(NamedTuple):
    """The memory of a step on one device, in bytes.

    Attributes:
      live: arguments and temporaries that are live at once, when most are.
      allocated: what is reserved, with the gaps between arrays; of a refused step at least what it asked for.
      arguments: what goes into the step.
      arrays: what is live when most is, arguments included, the largest first.
      moment: when that is, in words.
    """

    live: int
    allocated: int
    arguments: int
    arrays: tuple[LiveArray, ...]
    moment: str


def memory_of(answer: Answer, layout: Layout) -> Memory:
    """Return the memory that a compiler assigned to a step of a layout, or that a refused step asked for."""
    refusal = parse_refusal(answer.refusal)
    asked = 0 if refusal is None else refusal.asked
    if (found := answer.assignment) is None:
        return Memory(asked, asked, 0, (), "")
    arrays = live_arrays(found, answer.text, layout)
    moment = moment_words(found, answer.text)
    return Memory(found.peak, max(found.allocated, asked), sum(found.arguments.values()), arrays, moment)
