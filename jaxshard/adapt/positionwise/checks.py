"""Checks that several rules share, of operands that say what is taken and of numbers that go with positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, Mixes
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.shares import is_share, refuse


def check_degrees(facts: Sequence[Fact]) -> None:
    """Raise where a number that depends on how many positions there are goes with them."""
    if any(fact.degree for fact in facts if fact.kind is Kind.SAME):
        raise Mixes("combines positions with a number that depends on how many there are", "number")


def plain(pair: Pair, facts: list[Fact]) -> Fact | None:
    """Return the fact of a result where nothing depends on positions; else None."""
    if all(fact.kind is Kind.SAME for fact in facts) and not pair.grown():
        return SAME if not any(fact.degree for fact in facts) else None
    return None


def check_same(pair: Pair, facts: Sequence[Fact]) -> None:
    """Raise where numbers that say what is taken, such as the start of a slice, depend on positions."""
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
        if fact.kind is Kind.ALONG:
            raise Mixes("takes what single positions say")
        if fact.degree:
            raise Mixes("takes what the number of positions says", "number")


def moved(pair: Pair, facts: list[Fact], dim: Callable[[int], int]) -> Fact:
    """Return the fact of the first operand, whose dimensions are moved by `dim`; the others only say what is taken."""
    fact, *others = facts
    check_same(pair, others)
    return fact._replace(dim=dim(fact.dim)) if fact.kind is Kind.ALONG else fact
