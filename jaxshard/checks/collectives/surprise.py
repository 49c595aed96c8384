"""Explain an unpromised collective (a surprise), and advise what to do about it, by source line and kind.

- all-gather over tensor, 3 times, 3.84 kB: f32[2, 4, 40] and 1 more
    at model.py:31
    logits, all 40 of a vocabulary: must never move over tensor
    a constraint asks for all of dimension 2, split over tensor: exp at model.py:32 reads it
    keep the logits split, js.constrain(x, ('batch', None, 'vocab')): js.cross_entropy works on split logits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard.checks.collectives.cause import array_words, cause
from jaxshard.core.text_table import first_words
from jaxshard.hlo.counts import grouped, total
from jaxshard.hlo.found import Collective
from jaxshard.hlo.operation import by_line, describe, total_size
from jaxshard.hlo.trail import COLLECTIVES, PRODUCTS, operation_of, pass_of

_SCATTER = "scatter-add"
"""JAX's name of the operation that makes the gradient of an array that is looked up by indices."""
_SHOWN = 8
"""The number of groups of surprises that are printed."""
_ORDERED = ("sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k")


@dataclass(frozen=True)
class Surprise:
    """A collective of the program that the layout does not imply.

    Attributes:
      found: the collective, with only its unpromised arrays.
      why: the reason in words: nothing like it is promised, it happens more often than promised, or it is forbidden.
      constraint: the call that keeps its first array split, such as "js.constrain(x, ('batch', None, 'features'))".

    Example:
        for surprise in js.audit(step, batch).surprises:
            print(surprise.place, surprise.cause, surprise.advice)
    """

    found: Collective
    why: str
    constraint: str = ""

    @property
    def place(self) -> str:
        """The line in the user's model that issues it or uses its result; else the operation's name in the program."""
        return self.found.place

    @property
    def cause(self) -> str:
        """Why the collective is in the program, such as "a constraint asks for all of dimension 2"; "" if not known."""
        return cause(self.found)

    @property
    def advice(self) -> str:
        """One sentence on how to change the program so that the collective is not needed."""
        return _advice(self)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: the entries of the collective, and "what", "why", "cause" and "advice"."""
        words = {"what": array_words(self.found), "why": self.why, "cause": self.cause, "advice": self.advice}
        return self.found.as_dict() | words

    def __str__(self) -> str:
        return _entry([self])


def entries(surprises: Sequence[Surprise], *, all: bool = False) -> list[str]:
    """Write the entries of the list of surprises in a report.

    Surprises of the same source line and kind share an entry, and only the largest groups are listed. With `all` every
    surprise has an entry.
    """
    if all:
        return [str(one) for one in surprises]
    groups = by_line(surprises, lambda one: one.found)
    shown = [_entry(of) for of in groups[:_SHOWN]]
    if rest := [one.found for of in groups[_SHOWN:] for one in of]:
        shown.append(f"and at {len(groups) - _SHOWN} more lines, {total_size(rest)}")
    return shown


def _entry(of: Sequence[Surprise]) -> str:
    words = (describe([one.found for one in of]), of[0].why, of[0].cause, of[0].advice)
    return "\n    ".join(filter(None, words))


def merged(surprises: Iterable[Surprise]) -> tuple[Surprise, ...]:
    """Merge surprises that have the same source line, kind, axes, arrays and reason; add up their counts."""

    def key(one: Surprise) -> tuple[Any, ...]:
        found = one.found  # unknown counts are not added to known ones
        return found.title, found.arrays, found.source, found.count is None, one.why

    groups = grouped(surprises, key).values()
    return tuple(
        replace(of[-1], found=replace(of[-1].found, count=total(one.found.count for one in of))) for of in groups
    )


def wanted_axes(found: Collective, rows: Sequence[str]) -> list[tuple[str, ...]]:
    """Return mesh axes for each dimension of an array: if the array were split so, its collective would not be needed.

    For example `[("data",), (), ("tensor",)]` for logits [batch, positions, vocabulary] that are gathered over tensor.

    Args:
      found: the collective.
      rows: the mesh axes over which devices have different rows; they split the first dimension.
    """
    rank = len(found.shapes[0])
    others = tuple(axis for axis in found.axes if axis not in rows)
    axes: list[tuple[str, ...]] = [()] * rank
    axes[:1] = [tuple(rows)] * min(rank, 1)
    if others and rank > 1:
        axes[found.trail.dim or -1] = others
    return axes


def _advice(one: Surprise) -> str:
    own, over, trail = operation_of(one.found.op_name), "+".join(one.found.axes), one.found.trail
    made, read, made_at = trail.maker, trail.reader, trail.made_at
    constraint = one.constraint or "constrain it"
    if one.why.startswith("wire dtype"):
        return "to sum in fewer bits set reduce_dtype= of the engine; else cast after the sum"
    if "optax" in one.place:
        return "the optimizer reads full arrays: take an elementwise one, or a strategy that keeps its state replicated"
    if own in COLLECTIVES and one.found.is_users:
        return "take it out: return js.Mean and js.Sum of a device's own rows, which the engine adds up"
    if one.why.startswith("logits"):
        return f"keep the logits split, {constraint}: js.cross_entropy works on split logits"
    if pass_of(one.found.op_name) == "backward pass" and _SCATTER in (own, made):
        return _advise_gradient_of_lookup(one.found)
    if "sharding_constraint" in (own, read):
        return f"take the constraint out, or keep the dimension split over {over}: {constraint}"
    if {own, made, read} & set(_ORDERED):
        return f"sort or accumulate within a row, or after a reduction: along {over} each device has a part"
    if "must never move" in one.why:
        return f"use the weight in a product as it is stored, or keep it replicated over {over} by a rule of js.tensor"
    stored = [name for name in trail.arguments if not name.startswith("batch")]
    if stored and not one.why.startswith("batch"):
        words = first_words(stored)
        return f"{words} is moved for this line alone: use it as it is stored, or let the strategy keep it replicated"
    if "gradient of" in one.why:
        return "add up the gradients of all uses and micro-batches on each device first, and over devices once"
    if {own, made} & set(PRODUCTS):
        return f"shard both operands of the product alike, and its result: {constraint}"
    result = f"the result of {made} at {made_at}" if made and made_at else "the array where it is made"
    return f"constrain {result}, {constraint}, or let js.explicit compute each device's rows by themselves"


def _advise_gradient_of_lookup(found: Collective) -> str:
    """Advise about the gradient of a table, which the compiler makes by a scatter-add that no line of the user has."""
    line = (found.trail.made_at if found.trail.maker == _SCATTER else "") or found.place
    return (
        f"it is for the gradient of the table looked up at {line}: leave it if its {total_size([found])} are few, "
        "or let the strategy keep the table replicated (a rule of js.tensor with 'whole', or min_size= of js.fsdp), "
        "or use js.explicit"
    )
