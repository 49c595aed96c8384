"""Facts of the proof: how a value on one of n devices relates to the same value in a run on one device.

    kind    on one device             on device i of n                              examples
    SAME    a value                   the value divided by n**degree                weights, x.shape[1] (degree 1)
    ALONG   one entry per position    the entries of its own positions              tokens, activations
    SUM     a sum over positions      a share; the shares add up to n**degree * sum x.sum(1), x.mean(1) (degree 1)
    MAX     a maximum over positions  a share; the largest share is the maximum     x.max(1)
    LOST    anything                  unknown; the reason was reported              attention weights [T, T]

Dimension dim of an ALONG value has the size outer * T * inner for T positions: index (o * T + t) * inner + i belongs to
position t. So the proof can follow reshapes that merge rows and positions, [B, T, C] -> [B * T, C], and split them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from jaxshard.proofs.walk import Refused


class Kind(Enum):
    """The kinds of the table at the top of the file."""

    SAME = "same"
    ALONG = "along"
    SUM = "sum"
    MAX = "max"
    LOST = "lost"


class Fact(NamedTuple):
    """A fact about one value.

    Attributes:
      kind: see the table at the top of the file.
      dim: for ALONG, the dimension of the positions.
      outer: for ALONG, how often the sequence of all positions is repeated in that dimension; 0 if the value is
        constant along it, so that any order of its entries is right.
      inner: for ALONG, how many adjacent entries belong to one position.
      degree: for SAME and SUM, see the table; `ODD` if the value is no power of n times another.
      zero: the value is zero, so it is a valid share of any sum.
      cause: for SUM and MAX, the equation that made it (a `report.Cause`).
    """

    kind: Kind
    dim: int = -1
    outer: int = 1
    inner: int = 1
    degree: float = 0
    zero: bool = False
    cause: Any = None

    @property
    def is_constant(self) -> bool:
        return self.kind is Kind.ALONG and self.outer == 0

    @property
    def shares(self) -> float:
        """Return the degree of this value as a share of a sum: n equal values add up to n times the value."""
        return 1 - self.degree if self.kind is Kind.SAME else self.degree


ODD = math.nan
"""The degree of a value that depends on the number of positions, but not as a power of it."""

SAME = Fact(Kind.SAME)
LOST = Fact(Kind.LOST)


def along(dim: int, outer: int = 1, inner: int = 1) -> Fact:
    """Make the fact of a value with positions in a dimension."""
    return Fact(Kind.ALONG, dim, outer, inner)


def constant_along(dim: int) -> Fact:
    """Make the fact of a value with a dimension of positions along which it is constant."""
    return Fact(Kind.ALONG, dim, 0, 0)


class Mixes(Refused):
    """Raised for an equation that gives a wrong result on a part of the positions.

    Args:
      what: the predicate of the sentence "reduce_max at model.py:12 ...".
      fix: a key of `report.FIXES`.
      cause: the equation to report instead of this one.
    """

    def __init__(self, what: str, fix: str = "auto", cause: Any = None):
        super().__init__(what)
        self.what, self.fix, self.cause = what, fix, cause


def differing(one: Sequence[int], two: Sequence[int]) -> list[int]:
    """List the dimensions in which two shapes of equal rank differ: those whose size depends on the positions."""
    return [dim for dim, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


def is_consistent(fact: Fact, one: Sequence[int], two: Sequence[int], parts: int, length: int = 0) -> bool:
    """Return whether a fact fits the shapes of a value for all positions and for one of `parts` equal parts of them."""
    if fact.kind is Kind.LOST:
        return True
    dims = differing(one, two)
    if fact.kind is not Kind.ALONG:
        return not dims
    if dims != [fact.dim] or one[fact.dim] != parts * two[fact.dim]:
        return False
    return fact.is_constant or not length or one[fact.dim] == fact.outer * length * fact.inner


def guess(one: Sequence[int], two: Sequence[int], parts: int) -> Fact:
    """Guess the fact of a value from its shapes, to continue after a problem that was reported already."""
    if len(one) != len(two):
        return LOST
    dims = differing(one, two)
    found = SAME if not dims else constant_along(dims[0])
    return found if is_consistent(found, one, two, parts) else LOST


def same_positions(facts: Sequence[Fact]) -> Fact:
    """Return the fact of a value whose position t depends only on position t of all these ALONG values.

    Raises:
      Mixes: their positions are in different dimensions, or in another order within one.
    """
    definite = [fact for fact in facts if not fact.is_constant] or list(facts)
    if len({fact.dim for fact in facts}) > 1 or len({(fact.outer, fact.inner) for fact in definite}) > 1:
        raise Mixes("combines positions with other positions", "attention")
    return definite[0]._replace(degree=0, zero=False)


def reshaped(fact: Fact, one: Sequence[int], new: Sequence[int], new_dims: Sequence[int], length: int) -> Fact | None:
    """Follow positions through a reshape.

    Args:
      fact: the fact of the operand, ALONG.
      one: the shape of the operand.
      new: the new shape.
      new_dims: the new dimensions whose size depends on the number of positions.
      length: the number of positions.

    Returns:
      The fact of the result, or None if its positions are not in a single dimension.
    """
    if len(new_dims) != 1:
        return None
    (dim,) = new_dims
    if 0 in new:
        return constant_along(dim)
    before, after = math.prod(new[:dim]), math.prod(new[dim + 1 :])
    old_before, old_after = math.prod(one[: fact.dim]), math.prod(one[fact.dim + 1 :])
    if fact.is_constant:
        if (before, after) == (old_before, old_after):
            return constant_along(dim)
        fact = along(fact.dim, one[fact.dim] // length)
    # Elements before and after the positions, counted over all dimensions, do not change in a reshape.
    outer, inner = old_before * fact.outer, old_after * fact.inner
    if outer % before or inner % after or outer // before * length * (inner // after) != new[dim]:
        return None
    return along(dim, outer // before, inner // after)
