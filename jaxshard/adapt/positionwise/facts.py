"""Facts of the proof: how a value on one of n devices relates to the same value in a run on one device.

    kind    on one device             on device i of n                              examples
    SAME    a value                   the value divided by n**degree                weights, x.shape[1] (degree 1)
    ALONG   one entry per position    the entries of its own positions              tokens, activations
    SUM     a sum over positions      a share; the shares add up to n**degree * sum x.sum(1), x.mean(1) (degree 1)
    MAX     a maximum over positions  a share; the largest share is the maximum     x.max(1)
    LOST    anything                  unknown; the reason was reported              attention weights [T, T]

Dimension `dim` of an ALONG value has the size outer * T * inner for T positions: index (o * T + t) * inner + i belongs
to position t. So the proof can follow reshapes that merge rows and positions, [B, T, C] -> [B * T, C], and reshapes
that separate them again.
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
    """The knowledge of the proof about one value.

    Attributes:
      kind: see the table at the top of the file.
      dim: for ALONG, the dimension of the positions.
      outer: for ALONG, how often the sequence of all positions is repeated in this dimension; 0 if the value is
        constant along the dimension, so that any order of its entries is right.
      inner: for ALONG, how many adjacent entries belong to one position.
      degree: for SAME and SUM, see the table; `ODD` if the value depends on n otherwise than by a power of n.
      zero: True if the value is zero, and so a valid share of any sum.
      cause: for SUM and MAX, the place of the equation that made the value (a `report.Cause`).
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
        """Return d if the values of n devices add up to n**d times the value on one device; for SAME and SUM."""
        return 1 - self.degree if self.kind is Kind.SAME else self.degree


ODD = math.nan
"""The degree of a value that depends on the number of positions otherwise than by a power of this number."""

SAME = Fact(Kind.SAME)
LOST = Fact(Kind.LOST)


def along(dim: int, outer: int = 1, inner: int = 1) -> Fact:
    """Make the fact about a value with positions in a dimension; see `Fact` for the arguments."""
    return Fact(Kind.ALONG, dim, outer, inner)


def constant_along(dim: int) -> Fact:
    """Make the fact about a value that has positions in a dimension, and is constant along this dimension."""
    return Fact(Kind.ALONG, dim, 0, 0)


class Mixes(Refused):
    """Raised for an equation that gives a wrong result on a part of the positions.

    Args:
      what: the predicate of an error message that begins with the operation, as in "reduce_max at model.py:12 ...".
      fix: a key of `report.FIXES`, for what the user should write instead.
      cause: the place of another equation that the message should name instead (a `report.Cause`).
    """

    def __init__(self, what: str, fix: str = "auto", cause: Any = None):
        super().__init__(what)
        self.what, self.fix, self.cause = what, fix, cause


def differing(one: Sequence[int], two: Sequence[int]) -> list[int]:
    """List the dimensions in which a value's shapes in the two traces differ, since they depend on the positions."""
    return [dim for dim, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


def is_consistent(fact: Fact, one: Sequence[int], two: Sequence[int], parts: int, length: int = 0) -> bool:
    """Return True if a fact about a value agrees with the value's shapes in the two traces.

    Args:
      fact: the fact.
      one: the shape for all positions.
      two: the shape for one of `parts` equal parts of the positions.
      parts: the number of parts.
      length: the number of all positions; 0 leaves out the check that needs it.
    """
    if fact.kind is Kind.LOST:
        return True
    dims = differing(one, two)
    if fact.kind is not Kind.ALONG:
        return not dims
    if dims != [fact.dim] or one[fact.dim] != parts * two[fact.dim]:
        return False
    return fact.is_constant or not length or one[fact.dim] == fact.outer * length * fact.inner


def guess(one: Sequence[int], two: Sequence[int], parts: int) -> Fact:
    """Guess the fact about a value from its shapes in the two traces, to go on after an equation that was refused."""
    if len(one) != len(two):
        return LOST
    dims = differing(one, two)
    found = SAME if not dims else constant_along(dims[0])
    return found if is_consistent(found, one, two, parts) else LOST


def same_positions(facts: Sequence[Fact]) -> Fact:
    """Return the fact about a value whose position t is computed from position t of all these ALONG values.

    Raises:
      Mixes: the values have their positions in different dimensions, or in different orders.
    """
    definite = [fact for fact in facts if not fact.is_constant] or list(facts)
    if len({fact.dim for fact in facts}) > 1 or len({(fact.outer, fact.inner) for fact in definite}) > 1:
        raise Mixes("combines positions with other positions", "attention")
    return definite[0]._replace(degree=0, zero=False)


def reshaped(fact: Fact, one: Sequence[int], new: Sequence[int], new_dims: Sequence[int], length: int) -> Fact | None:
    """Return the fact about the result of a reshape of an ALONG value.

    Args:
      fact: the fact about the operand.
      one: the shape of the operand.
      new: the shape of the result.
      new_dims: the dimensions of the result whose size depends on the number of positions.
      length: the number of positions.

    Returns:
      The fact, or None if the positions of the result are not in a single dimension.
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
