"""The results of the proofs: the outputs of a transform that violate a property, and the equations to blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxshard.core.text_table import first_words
from jaxshard.optim.proof.facts import Origin


class Reason(NamedTuple):
    """An output of a transform that violates a property, such as being elementwise, and the equation to blame.

    Attributes:
      output: The output, such as "update w" or "state 0/nu/w".
      source: The equation to blame, with its transform and line.
    """

    output: str
    source: Origin

    def __str__(self) -> str:
        return describe([self])


@dataclass(frozen=True)
class Report:
    """The result of `check_elementwise`: true if the transform is elementwise.

    `reasons` has one entry for each output that is not elementwise. `str(report)` is one line, such as

        not elementwise: clip_by_global_norm: reduce_sum at optax/transforms/_clipping.py:97 mixes elements of w
        (update w, update b)
    """

    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "elementwise" if self else f"not elementwise: {describe(self.reasons)}"


def describe(reasons: Sequence[Reason]) -> str:
    """Format the reasons why a proof failed as one line of text.

    Each equation is named once, with the outputs that it affects, for example:

        clip_by_global_norm: reduce_sum at optax/transforms/_clipping.py:97 mixes elements of w (update w, update b)
    """
    outputs: dict[Origin, list[Reason]] = {}
    for reason in reasons:
        # Merge equations from the same line of the user's code, even if they mention different parameters.
        blamed = reason.source._replace(text="") if reason.source.where else reason.source
        outputs.setdefault(blamed, []).append(reason)
    lines = [
        f"{found[0].source} ({first_words([*dict.fromkeys(reason.output for reason in found)])})"
        for found in outputs.values()
    ]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
