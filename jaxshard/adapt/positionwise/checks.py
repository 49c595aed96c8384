"""Checks that several rules share: of operands that select elements, and of values that count positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, Mixes
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.shares import is_share, refuse


def check_degrees(facts: Sequence[Fact]) -> None:
    """Raise `Mixes` if any value depends on the number of positions; the caller combines the values with positions."""
    if any(fact.degree for fact in facts if fact.kind is Kind.SAME):
        raise Mixes("combines positions with a number that depends on how many there are", "number")


def plain(pair: Pair, facts: list[Fact]) -> Fact | None:
    """Return the fact about a result if neither an operand nor the result's shape depends on positions; else None."""
    if all(fact.kind is Kind.SAME for fact in facts) and not pair.grown():
        return SAME if not any(fact.degree for fact in facts) else None
    return None


def check_same(pair: Pair, facts: Sequence[Fact]) -> None:
    """Raise `Mixes` if operands that select elements, such as the start of a slice, depend on positions."""
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
        if fact.kind is Kind.ALONG:
            raise Mixes("selects elements by the values of single positions")
        if fact.degree:
            raise Mixes("selects elements by the number of positions", "number")


def moved(pair: Pair, facts: list[Fact], dim: Callable[[int], int]) -> Fact:
    """Return the fact of the first operand with its dimension moved by `dim`; the others only select elements."""
    fact, *others = facts
    check_same(pair, others)
    return fact._replace(dim=dim(fact.dim)) if fact.kind is Kind.ALONG else fact
