"""Checks that several rules share: of operands that select elements, and of values that count positions."""

from __future__ import annotations

from collections.abc import Sequence

from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, Mixes
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.shares import is_share, refuse
from jaxshard.proofs.dims import follow_dim


def check_degrees(facts: Sequence[Fact]) -> None:
    """Raise `Mixes` if any value depends on how many positions there are, as `x.shape[1]` does.

    Call it for the operands of an equation that combines them with per-position values.
    """
    if any(fact.degree for fact in facts if fact.kind is Kind.SAME):
        raise Mixes("combines positions with a number that depends on how many there are", "number")


def plain(pair: Pair, facts: list[Fact]) -> Fact | None:
    """Return the fact SAME (equal on all devices) if neither the operands nor the result's shape depend on positions.

    Return None otherwise.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how each operand depends on the positions.
    """
    if all(fact.kind is Kind.SAME for fact in facts) and not pair.grown():
        return SAME if not any(fact.degree for fact in facts) else None
    return None


def check_same(pair: Pair, facts: Sequence[Fact]) -> None:
    """Raise `Mixes` if an operand that selects elements, such as the start index of a slice, depends on positions."""
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
        if fact.kind is Kind.ALONG:
            raise Mixes("selects elements by the values of single positions")
        if fact.degree:
            raise Mixes("selects elements by the number of positions", "number")


def moved(pair: Pair, facts: list[Fact]) -> Fact:
    """Return the fact about the result of an equation that only rearranges its first operand, such as a transpose.

    The fact says in which dimension the result has the sequence positions.

    Raises:
      Mixes: another operand, such as the start index of a slice, depends on positions.
    """
    fact, *others = facts
    check_same(pair, others)
    if fact.kind is not Kind.ALONG:
        return fact
    to = follow_dim(pair.one, 0, fact.dim)
    assert to is not None, "positions have no dimension of size 1, and slices of them were refused"
    return fact._replace(dim=to)
