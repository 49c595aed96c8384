"""Add up the cycles that a TPU's compiler estimates, with the iterations of loops."""

from __future__ import annotations

import re

from jaxshard.hlo import hlo
from jaxshard.hlo.walk import executed

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_NONE = 2**62
"""Cycles from this number on mean that there is no estimate: the compiler writes the largest integer."""


def estimated_cycles(text: str) -> int | None:
    """Add up the cycles that the compiler estimates for each operation, times its executions in a step.

    The compiler does not estimate Pallas kernels and collectives. A branch of a conditional counts as if it were always
    taken, and a loop of unknown trip count as one iteration.

    Args:
      text: the text of a program compiled for a TPU, as `compiled.as_text()` prints it.

    Returns:
      Cycles of one device; None for a program without estimates, such as a GPU's.
    """
    total = 0
    for found in executed(hlo.parse(text), _ESTIMATE, fused=False):
        estimate = _ESTIMATE.findall(found.op.attributes + found.op.notes)
        cycles = int(estimate[0]) if estimate else 0
        total += cycles * (found.times or 1) if cycles < _NONE else 0
    return total or None
