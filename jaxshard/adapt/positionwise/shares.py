"""Rules for shares (a device's part of a sum or maximum over positions), and for values that count positions.

A loss sums over its positions and passes totals to `js.Mean` and `js.Sum`, which are summed over devices. Before that
only linear functions may be applied to a share of a sum: f(a) + f(b) = f(a + b). A value such as `x.shape[1]` is n
times smaller on each of n devices, so the shares of x.sum() / x.shape[1] add up to n times the value on one device:
their degree is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshard.adapt.positionwise.facts import ODD, SAME, Fact, Kind, Mixes
from jaxshard.adapt.positionwise.pair import Pair

_CASTS = frozenset({"convert_element_type", "reduce_precision", "real", "copy"})
_SIGNED = frozenset({"neg", "abs", "sign"}) | _CASTS
_SUMS = frozenset({"add", "sub", "add_any"})


def is_share(fact: Fact) -> bool:
    """Return True if each device has only its share of the value: one of n summands, or one of n candidate maxima."""
    return fact.kind in (Kind.SUM, Kind.MAX)


def refuse(pair: Pair, share: Fact, how: str = "") -> Mixes:
    """Make the exception for an operation that needs a complete sum or maximum, of which each device has only a share.

    Args:
      pair: the refused equation.
      share: the fact about the operand, of kind SUM or MAX.
      how: a clause for the message that says how the operand is used, such as "which branch runs depends on it".
    """
    what = "sum" if share.kind is Kind.SUM else "maximum"
    how = how or f"{pair.name} needs all of it"
    return Mixes(f"is a {what} over the positions, of which each device has a share, but {how}", "sum", share.cause)


def combine_numbers(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Return the fact about the result of an elementwise function of values that do not vary with position.

    All `facts` are of kind SAME: on n devices each device has the single-device value divided by n**degree. The
    result's degree follows from the degrees of the operands: x.shape[1] has degree 1, and its square has degree 2.
    """
    name = pair.name
    degrees = [fact.degree for fact in facts]
    if not any(degrees):
        linear = name in _SUMS | _SIGNED | {"max", "min"}
        zero = all(fact.zero for fact in facts) if linear else name == "mul" and any(fact.zero for fact in facts)
        return SAME._replace(zero=zero)
    exact = np.issubdtype(pair.one.outvars[0].aval.dtype, np.integer)
    counted = {fact.degree for fact in facts if not fact.zero}
    degree = ODD
    if name == "mul":
        degree = sum(degrees)
    elif name == "div" and not exact:
        degree = degrees[0] - degrees[1]
    elif name == "integer_pow":
        degree = degrees[0] * pair.params["y"]
    elif name in ("sqrt", "rsqrt", "square"):
        degree = degrees[0] * {"sqrt": 0.5, "rsqrt": -0.5, "square": 2}[name]
    elif name in _SIGNED or (name in _SUMS and len(counted) == 1):
        degree = max(counted, key=abs, default=0)
    return SAME._replace(degree=ODD if math.isnan(degree) else degree)


def combine_shares(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Return the fact about the result of an elementwise function that has at least one share as operand.

    A share is a device's part of a sum or maximum over positions. The other operands must not vary with position.

    Raises:
      Mixes: the function is not linear for shares of a sum, or is not a maximum for shares of a maximum.
    """
    share = next(fact for fact in facts if is_share(fact))
    maximum = share.kind is Kind.MAX
    if any(fact.kind is not share.kind for fact in facts if is_share(fact)):
        raise refuse(pair, share)
    if maximum:
        if pair.name == "max" and not any(fact.degree for fact in facts if fact.kind is Kind.SAME):
            return share
        if pair.name in _CASTS:
            return share
        raise refuse(pair, share)
    return _linear(pair, facts, share)


def _linear(pair: Pair, facts: Sequence[Fact], share: Fact) -> Fact:
    name, dtype = pair.name, pair.one.outvars[0].aval.dtype
    if name in _SUMS:
        return sum_of(pair, facts)
    others = [fact for fact in facts if not is_share(fact)]
    if name == "mul" and len(others) == 1:
        return share._replace(degree=share.degree - others[0].degree)
    if name == "div" and facts[0] is share and len(others) == 1 and not np.issubdtype(dtype, np.integer):
        return share._replace(degree=share.degree + others[0].degree)
    if name == "select_n" and not is_share(facts[0]) and not facts[0].degree:
        return sum_of(pair, facts[1:])
    # A cast to integers would round each share.
    if name == "neg" or (name in _CASTS and (np.issubdtype(dtype, np.inexact) or _is_integer(pair))):
        return share
    raise refuse(pair, share)


def _is_integer(pair: Pair) -> bool:
    kinds = [x.aval.dtype for x in (pair.one.invars[0], pair.one.outvars[0])]
    return all(np.issubdtype(dtype, np.integer) for dtype in kinds)


def sum_of(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Return the fact about a value that is the sum of several values, or one of them (a select), if some are shares.

    A share is a device's part of a sum or maximum over positions.

    Raises:
      Mixes: the devices' values combine in different ways, such as a share of a sum and a value that is equal on all
        devices, which would be added once for each device.
    """
    share = next(fact for fact in facts if is_share(fact))
    if share.kind is Kind.MAX and not all(fact.kind is Kind.MAX for fact in facts):
        raise refuse(pair, share)
    if share.kind is Kind.SUM and len({fact.shares for fact in facts if not fact.zero}) > 1:
        raise refuse(pair, share, "what is added to it counts once for each device")
    return share


def number(one: Any, two: Any, parts: int) -> Fact:
    """Return the fact about a constant from its values in both traces: SAME, with the degree that relates them.

    For example, degree 1 if it is 128 in the trace for all positions (`one`) and 64 in the trace for one of two devices
    (`two`): they differ by `parts` to the power of 1. The degree is `ODD` if no such power is found.
    """
    a, b = np.asarray(one), np.asarray(two)
    if a.dtype == b.dtype and (np.array_equal(a, b) or a.tobytes() == b.tobytes()):
        return SAME._replace(zero=a.dtype.kind in "iuf" and not a.any())
    # A scalar whose two values differ by a power of `parts`, such as x.shape[1] or 1 / x.shape[1].
    if a.shape == b.shape == () and a.dtype.kind in "iuf":
        for degree in (1, -1, 2, -2, 0.5, -0.5):
            if np.isclose(float(a), float(b) * parts**degree, rtol=1e-6, atol=0):
                return SAME._replace(degree=degree)
    return SAME._replace(degree=ODD)
