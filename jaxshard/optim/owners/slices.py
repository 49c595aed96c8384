"""Prove that the matrices of a stacked array [L, m, n] are updated independently of each other.

A model that runs its blocks in a `scan` stacks their weights. Muon mapped over the stack (`js.optim.per_block`, or
dimension numbers of its own) runs one batched program, in which slice s of every value depends only on slice s of the
inputs. The proof follows the stacked dimension through that program:

    g[L, m, n] -> transpose -> [L, n, m] -> dot_general, batched over dim 0 -> [L, n, n] -> sum over dim 1 -> [L, n]

It fails at an operation that sums over the stacked dimension, reorders slices or compares them. The program of one
matrix is the same update traced with L = 1; it must consist of the same operations in the same order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.factorizations import FACTORIZATIONS
from jaxshard.core.primitives import ELEMENTWISE, SAME
from jaxshard.optim.owners.cores import Core
from jaxshard.proofs.alike import same_programs
from jaxshard.proofs.walk import Domain, Place, Refused, walk

_ALONG = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"})
"""Primitives that combine elements along params["axis"] and keep the shape."""


class Rows(NamedTuple):
    """The stacked dimension of a value.

    Attributes:
      dim: the stacked dimension; None for a value that does not depend on any slice.
      varies: if dim is None, the dimensions along which the value is not constant.
    """

    dim: int | None
    varies: frozenset[int] = frozenset()


def has_own_slices(core: Core, count: int) -> tuple[bool, ...] | None:
    """Prove that slice s of every output of a core depends only on slice s of its inputs.

    Args:
      core: The core of a parameter [count, ...].
      count: The number of slices.

    Returns:
      For each shared input of the core whether it has a row for each slice; None if the proof fails.
    """

    def stacked(var: Any) -> bool:
        return bool(var.aval.shape[:1] == (count,))

    jaxpr = core.program
    first = len(core.ins)
    held = jaxpr.invars[first : first + len(core.states)]
    shared = jaxpr.invars[first + len(core.states) :]
    if not all(map(stacked, held)):
        return None
    given = [Rows(0) if stacked(var) else Rows(None) for var in (*jaxpr.invars[:first], *held)]
    # A shared array of `count` elements may have one for each slice, or happen to have that size (three coefficients of
    # a polynomial, three blocks): try both.
    for sliced in (tuple(map(stacked, shared)), (False,) * len(shared)):
        rest = [Rows(0) if one else _without_slices(var.aval) for one, var in zip(sliced, shared, strict=True)]
        with contextlib.suppress(Refused):
            if all(one.dim == 0 for one in walk(jaxpr, [*given, *rest], _Slices())):
                return sliced
    return None


class _Slices(Domain[Rows]):
    """Follows the stacked dimension; the walk ends at an operation that mixes slices or is unknown."""

    def value(self, values: Sequence[Any], place: Place) -> Rows:
        return _without_slices(values[0])

    def join(self, place: Place, facts: Sequence[Rows]) -> Rows:
        if all(one.dim is None for one in facts):
            return Rows(None, frozenset().union(*(one.varies for one in facts)))
        return Rows(_common(facts))

    def choose(self, place: Place, choice: Rows, facts: list[Rows]) -> list[Rows]:
        if choice.dim is not None:
            raise Refused
        return facts

    def rule(self, place: Place, facts: list[Rows]) -> list[Rows]:
        eqn = place.equation
        if eqn.effects or list(jaxprs_in_params(eqn.params)):
            raise Refused
        if all(one.dim is None for one in facts):
            return [Rows(None, _varies(eqn, facts, out)) for out in eqn.outvars]
        if place.name in SAME:
            return facts
        dim = _after(eqn, facts)
        if any(len(out.aval.shape) <= dim for out in eqn.outvars):
            raise Refused
        return place.joined(Rows(dim))

    def enter(self, place: Place, facts: list[Rows]) -> list[Rows]:
        if place.name != "scan":
            return facts
        kept = sum(scan_counts(place.equation.params))
        if any(one.dim == 0 for one in facts[kept:]):
            raise Refused  # the scan itself runs over the slices, which its carry may combine
        rows = [Rows(one.dim and one.dim - 1, frozenset(dim - 1 for dim in one.varies if dim)) for one in facts[kept:]]
        return [*facts[:kept], *rows]

    def leave(self, place: Place, facts: list[Rows]) -> list[Rows]:
        _, carries = scan_counts(place.equation.params)
        stacked = [
            Rows(None, frozenset({0, *(dim + 1 for dim in one.varies)})) if one.dim is None else Rows(one.dim + 1)
            for one in facts[carries:]
        ]
        return [*facts[:carries], *stacked]


def _without_slices(x: Any) -> Rows:
    return Rows(None, frozenset(range(np.ndim(x))))


def _varies(eqn: Any, given: list[Rows], out: Any) -> frozenset[int]:
    """Find the dimensions along which a result varies if no operand depends on slices."""
    name = eqn.primitive.name
    if name in ELEMENTWISE or name in SAME:
        return frozenset().union(*(one.varies for one in given))
    if name == "broadcast_in_dim":
        return frozenset(eqn.params["broadcast_dimensions"][dim] for dim in given[0].varies)
    if name == "iota":
        return frozenset({eqn.params["dimension"]})
    return frozenset(range(len(out.aval.shape)))


def _after(eqn: Any, given: list[Rows]) -> int:
    """Find the stacked dimension of an operation's results."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE or name in ("concatenate", "sort"):
        dim = _common(given)
        if params.get("dimension", -1) == dim:
            raise Refused
        return dim
    if name == "dot_general":
        return _product(eqn, given)
    if name == "gather":
        return _gather(eqn, given)
    first = given[0].dim
    if first is None or any(one.dim not in (None, first) for one in given):
        raise Refused
    dim, x = first, eqn.invars[0].aval.shape
    if name in FACTORIZATIONS and all(one.dim is not None for one in given) and dim < len(x) - 2:
        return dim
    if name in _MOVES:
        return _MOVES[name](eqn, dim, given)
    if name in _ALONG and params["axis"] != dim:
        return dim
    if (name.startswith("reduce_") or name in ("argmax", "argmin")) and dim not in params["axes"]:
        return dim - sum(int(axis < dim) for axis in params["axes"])
    raise Refused


def _common(given: Sequence[Rows]) -> int:
    """Find the stacked dimension that values share; values without slices must be constant along it."""
    dims = {one.dim for one in given if one.dim is not None}
    if len(dims) > 1 or any(one.dim is None and dims & one.varies for one in given):
        raise Refused
    (dim,) = dims
    return dim


def _product(eqn: Any, given: list[Rows]) -> int:
    (contracted, batches), ranks = eqn.params["dimension_numbers"], [len(x.aval.shape) for x in eqn.invars]
    places = []
    for side, one in enumerate(given):
        if one.dim is None:
            continue
        if one.dim in contracted[side]:
            raise Refused
        if one.dim in batches[side]:
            place = list(batches[side]).index(one.dim)
            other = given[1 - side]
            if other.dim is None and batches[1 - side][place] in other.varies:
                raise Refused
            if other.dim is not None and other.dim != batches[1 - side][place]:
                raise Refused
            places.append(place)
            continue
        if given[1 - side].dim is not None:
            raise Refused  # an outer product: every slice of one operand with every slice of the other
        # The result has the batch dimensions, then the free ones of the left operand, then those of the right.
        free = [dim for dim in range(ranks[side]) if dim not in contracted[side] and dim not in batches[side]]
        before = len(batches[0]) + (ranks[0] - len(contracted[0]) - len(batches[0]) if side else 0)
        places.append(before + free.index(one.dim))
    if len(set(places)) != 1:
        raise Refused
    return int(places[0])


def _gather(eqn: Any, given: list[Rows]) -> int:
    numbers, (operand, indices) = eqn.params["dimension_numbers"], given
    rank = len(eqn.outvars[0].aval.shape)
    rows = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    if indices.dim is not None:
        if operand.dim is None:
            if operand.varies and numbers.operand_batching_dims:
                raise Refused
            return int(rows[indices.dim])
        if operand.dim not in numbers.operand_batching_dims:
            raise Refused
        place = list(numbers.operand_batching_dims).index(operand.dim)
        if numbers.start_indices_batching_dims[place] != indices.dim:
            raise Refused
        return int(rows[indices.dim])
    if operand.dim is None:
        raise Refused
    dim = operand.dim
    fixed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    size = eqn.invars[0].aval.shape[dim]
    if dim in fixed or dim in numbers.start_index_map or eqn.params["slice_sizes"][dim] != size:
        raise Refused
    kept = [one for one in range(len(eqn.invars[0].aval.shape)) if one not in fixed]
    return int(numbers.offset_dims[kept.index(dim)])


# Operations that move elements. The first operand is stacked; each function returns the result's stacked dimension.


def _broadcast(eqn: Any, dim: int, given: list[Rows]) -> int:
    place = int(eqn.params["broadcast_dimensions"][dim])
    return _require(place, eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[place])


def _reshape(eqn: Any, dim: int, given: list[Rows]) -> int:
    x, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # A dimension stays itself in a reshape if equally many elements come before it and its size is the same.
    before = math.prod(x[:dim])
    fits = [place for place in range(len(out)) if math.prod(out[:place]) == before and out[place] == x[dim]]
    return _require(fits[0] if fits else 0, bool(fits) and eqn.params.get("dimensions") is None)


def _transpose(eqn: Any, dim: int, given: list[Rows]) -> int:
    return list(eqn.params["permutation"]).index(dim)


def _squeeze(eqn: Any, dim: int, given: list[Rows]) -> int:
    gone = eqn.params["dimensions"]
    return _require(dim - sum(one < dim for one in gone), dim not in gone)


def _slice(eqn: Any, dim: int, given: list[Rows]) -> int:
    strides = eqn.params["strides"]
    return _require(dim, eqn.outvars[0].aval.shape[dim] == eqn.invars[0].aval.shape[dim] and not strides)


def _dynamic(eqn: Any, dim: int, given: list[Rows]) -> int:
    second = 2 if eqn.primitive.name == "dynamic_update_slice" else 1
    same = eqn.invars[second - 1].aval.shape[dim] == eqn.outvars[0].aval.shape[dim] == eqn.invars[0].aval.shape[dim]
    stacked = all(one.dim == dim for one in given[:second]) and all(one.dim is None for one in given[second:])
    return _require(dim, same and stacked)


def _pad(eqn: Any, dim: int, given: list[Rows]) -> int:
    return _require(dim, tuple(eqn.params["padding_config"][dim]) == (0, 0, 0) and given[1].dim is None)


def _reverse(eqn: Any, dim: int, given: list[Rows]) -> int:
    return _require(dim, dim not in eqn.params["dimensions"])


def _require(dim: int, holds: bool) -> int:
    if not holds:
        raise Refused
    return dim


_MOVES: dict[str, Callable[[Any, int, list[Rows]], int]] = {
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic,
    "dynamic_update_slice": _dynamic,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}


# The program of one slice.

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding"})
"""Equation parameters that contain the size of a result, which may differ between L = count and L = 1."""


def is_program_of_one(whole: Core, one: Core, count: int) -> bool:
    """Return whether the core of a parameter [1, ...] has the same operations as the core of [count, ...]."""

    def same_type(x: Any, y: Any) -> bool:
        sizes = zip(x.shape, y.shape, strict=False)
        same = all(size == other or (size, other) == (count, 1) for size, other in sizes)
        return x.dtype == y.dtype and len(x.shape) == len(y.shape) and same

    sizes = [(len(core.ins), core.states, len(core.shared), len(core.outs)) for core in (whole, one)]
    return sizes[0] == sizes[1] and same_programs(whole.program, one.program, same_type=same_type, ignored=_SIZES)
