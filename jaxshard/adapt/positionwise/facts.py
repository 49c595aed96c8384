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
    """The ways in which a value on one of n devices relates to the value that a single device would compute.

    Attributes:
      SAME: the same value, or the value divided by a power of n, such as a weight or `x.shape[1]`.
      ALONG: an array with entries for each position; the device has those of its own positions.
      SUM: a sum over positions; the device has one of n summands.
      MAX: a maximum over positions; the device has the maximum over its own positions.
      LOST: unknown, because an equation was refused and reported.
    """

    SAME = "same"
    ALONG = "along"
    SUM = "sum"
    MAX = "max"
    LOST = "lost"


class Fact(NamedTuple):
    """The relation of one value of the loss on a device to the value that a single device computes from all positions.

    Attributes:
      kind: SAME, ALONG, SUM, MAX or LOST.
      dim: for ALONG, the dimension that has the positions.
      outer: for ALONG, how often the sequence of all positions is repeated in this dimension; 0 if the value is
        constant along the dimension, so that any order of its entries is right.
      inner: for ALONG, how many adjacent entries belong to one position.
      degree: d, for SAME and SUM on n devices. SAME: the device has the single-device value divided by n**d. SUM: the
        devices' values add up to n**d times the single-device value. `ODD` if no power of n describes the value.
      zero: True if the value is zero, and so can be added to any device's part of a sum.
      cause: for SUM and MAX, the equation that computed the sum or maximum, with its calls (a `report.Cause`).
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
        """Return d such that the values of all n devices add up to n**d times the single-device value.

        For SAME and SUM: for example, 1 for a weight (n equal values), and 0 for `x.sum(1)` (n summands).
        """
        return 1 - self.degree if self.kind is Kind.SAME else self.degree


ODD = math.nan
"""The degree of a value that depends on the number of positions otherwise than by a power of this number."""

SAME = Fact(Kind.SAME)
LOST = Fact(Kind.LOST)


def along(dim: int, outer: int = 1, inner: int = 1) -> Fact:
    """Return the fact that a value has the sequence positions in dimension `dim`.

    `outer` and `inner` are 1 for [B, T, C] with `dim` 1, and `outer` is B for [B * T, C] with `dim` 0; see `Fact`.
    """
    return Fact(Kind.ALONG, dim, outer, inner)


def constant_along(dim: int) -> Fact:
    """Return the fact that a value has the sequence positions in dimension `dim`, and equal entries for all of them."""
    return Fact(Kind.ALONG, dim, 0, 0)


class Mixes(Refused):
    """Raised for an equation whose result is wrong if a device computes it from only its own sequence positions.

    Args:
      what: the predicate of an error message that begins with the operation, as in "reduce_max at model.py:12 ...".
      fix: a key of `report.FIXES`, for what the user should write instead.
      cause: another equation that the message should name instead, with its calls (a `report.Cause`).
    """

    def __init__(self, what: str, fix: str = "auto", cause: Any = None):
        super().__init__(what)
        self.what, self.fix, self.cause = what, fix, cause


def differing(one: Sequence[int], two: Sequence[int]) -> list[int]:
    """List the dimensions in which two shapes differ: (2, 8, 4) and (2, 4, 4) -> [1].

    Args:
      one: the shape of a value in the trace for all positions.
      two: the shape of the same value in the trace for one device's positions.
    """
    return [dim for dim, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


def is_consistent(fact: Fact, one: Sequence[int], two: Sequence[int], parts: int, length: int = 0) -> bool:
    """Return True if a fact (how a value depends on the sequence positions) agrees with the value's shapes.

    Args:
      fact: the fact.
      one: the shape of the value in the trace for all positions.
      two: the shape of the value in the trace for one of `parts` equal parts of the positions.
      parts: the number of parts.
      length: the number of all positions, to check that the product of `outer`, `length` and `inner` is the size of the
        dimension; 0 skips this check.
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
    """Guess from a value's shapes how it depends on positions, so that a proof can continue after a refused equation.

    Args:
      one: the shape of the value in the trace for all positions.
      two: the shape of the value in the trace for one of `parts` equal parts of the positions.
      parts: the number of parts.

    Returns:
      SAME for equal shapes; the fact that one dimension has the positions if only this dimension differs, by the factor
      `parts`; otherwise LOST (unknown).
    """
    if len(one) != len(two):
        return LOST
    dims = differing(one, two)
    found = SAME if not dims else constant_along(dims[0])
    return found if is_consistent(found, one, two, parts) else LOST


def same_positions(facts: Sequence[Fact]) -> Fact:
    """Return the fact about a value that is computed position by position from these values, such as x + y.

    All `facts` must be of kind ALONG (the value has entries for each position).

    Raises:
      Mixes: the values have their positions in different dimensions, or in different orders.
    """
    definite = [fact for fact in facts if not fact.is_constant] or list(facts)
    if len({fact.dim for fact in facts}) > 1 or len({(fact.outer, fact.inner) for fact in definite}) > 1:
        raise Mixes("combines positions with other positions", "attention")
    return definite[0]._replace(degree=0, zero=False)


def reshaped(fact: Fact, one: Sequence[int], new: Sequence[int], new_dims: Sequence[int], length: int) -> Fact | None:
    """Return where a value has its sequence positions after a reshape, as a fact about the result.

    For example, from dimension 1 of [B, T, C] to dimension 0 of [B * T, C].

    Args:
      fact: the fact about the operand, of kind ALONG.
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
