"""Prove that the matrices of a stacked array [L, m, n] are updated independently of each other.

A model that runs its blocks in a `scan` stacks their parameters. If Muon is mapped over the stack (by
`js.optim.per_block`, or by Muon's own dimension numbers), it runs one batched program, in which slice s of every value
depends only on slice s of the inputs. The proof follows the stacked dimension through the program:

    g[L, m, n] -> transpose -> [L, n, m] -> dot_general, batched over dim 0 -> [L, n, n] -> sum over dim 1 -> [L, n]

It fails at an operation that sums over the stacked dimension, reorders slices or compares them. The program of one
matrix is the same update traced with L = 1; it must consist of the same operations in the same order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.factorizations import FACTORIZATIONS
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.core.primitives import ELEMENTWISE, SAME
from jaxshard.optim.owners.cores import Core

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


class _Mixes(Exception):
    """Raised at an operation that mixes slices or is unknown."""


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
        rest = [Rows(0) if one else _whole(var) for one, var in zip(sliced, shared, strict=True)]
        with contextlib.suppress(_Mixes):
            if all(one.dim == 0 for one in _walk(jaxpr, [*given, *rest])):
                return sliced
    return None


def is_program_of_one(whole: Core, one: Core, count: int) -> bool:
    """Return whether the core of a parameter [1, ...] has the same operations as the core of [count, ...]."""
    sizes = [(len(core.ins), core.states, len(core.shared), len(core.outs)) for core in (whole, one)]
    return sizes[0] == sizes[1] and _like(whole.program, one.program, count)


def _whole(var: Any) -> Rows:
    return Rows(None, frozenset(range(len(var.aval.shape))))


def _walk(program: Any, given: Sequence[Rows]) -> list[Rows]:
    jaxpr, _ = open_jaxpr(program)
    known = {var: _whole(var) for var in jaxpr.constvars} | dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Rows:
        return Rows(None) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _follow(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _follow(eqn: Any, given: list[Rows]) -> list[Rows]:
    name = eqn.primitive.name
    if name in CALLS:
        return _walk(eqn.params[CALLS[name]], given)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, given)
    if eqn.effects or list(jaxprs_in_params(eqn.params)):
        raise _Mixes
    if all(one.dim is None for one in given):
        return [Rows(None, _varies(eqn, given, out)) for out in eqn.outvars]
    if name in SAME:
        return given
    dim = _after(eqn, given)
    if any(len(out.aval.shape) <= dim for out in eqn.outvars):
        raise _Mixes
    return [Rows(dim)] * len(eqn.outvars)


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
        dim = _common(eqn, given)
        if params.get("dimension", -1) == dim:
            raise _Mixes
        return dim
    if name == "dot_general":
        return _product(eqn, given)
    if name == "gather":
        return _gather(eqn, given)
    first = given[0].dim
    if first is None or any(one.dim not in (None, first) for one in given):
        raise _Mixes
    dim, x = first, eqn.invars[0].aval.shape
    if name in FACTORIZATIONS and all(one.dim is not None for one in given) and dim < len(x) - 2:
        return dim
    if name in _MOVES:
        return _MOVES[name](eqn, dim, given)
    if name in _ALONG and params["axis"] != dim:
        return dim
    if (name.startswith("reduce_") or name in ("argmax", "argmin")) and dim not in params["axes"]:
        return dim - sum(int(axis < dim) for axis in params["axes"])
    raise _Mixes


def _common(eqn: Any, given: list[Rows]) -> int:
    """Find the stacked dimension that the operands share; operands without slices must be constant along it."""
    dims = {one.dim for one in given if one.dim is not None}
    if len(dims) > 1 or any(one.dim is None and dims & one.varies for one in given):
        raise _Mixes
    (dim,) = dims
    return dim


def _product(eqn: Any, given: list[Rows]) -> int:
    (contracted, batches), ranks = eqn.params["dimension_numbers"], [len(x.aval.shape) for x in eqn.invars]
    places = []
    for side, one in enumerate(given):
        if one.dim is None:
            continue
        if one.dim in contracted[side]:
            raise _Mixes
        if one.dim in batches[side]:
            place = list(batches[side]).index(one.dim)
            other = given[1 - side]
            if other.dim is None and batches[1 - side][place] in other.varies:
                raise _Mixes
            if other.dim is not None and other.dim != batches[1 - side][place]:
                raise _Mixes
            places.append(place)
            continue
        if given[1 - side].dim is not None:
            raise _Mixes  # an outer product: every slice of one operand with every slice of the other
        # The result has the batch dimensions, then the free ones of the left operand, then those of the right.
        free = [dim for dim in range(ranks[side]) if dim not in contracted[side] and dim not in batches[side]]
        before = len(batches[0]) + (ranks[0] - len(contracted[0]) - len(batches[0]) if side else 0)
        places.append(before + free.index(one.dim))
    if len(set(places)) != 1:
        raise _Mixes
    return int(places[0])


def _gather(eqn: Any, given: list[Rows]) -> int:
    numbers, (operand, indices) = eqn.params["dimension_numbers"], given
    rank = len(eqn.outvars[0].aval.shape)
    rows = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    if indices.dim is not None:
        if operand.dim is None:
            if operand.varies and numbers.operand_batching_dims:
                raise _Mixes
            return int(rows[indices.dim])
        if operand.dim not in numbers.operand_batching_dims:
            raise _Mixes
        place = list(numbers.operand_batching_dims).index(operand.dim)
        if numbers.start_indices_batching_dims[place] != indices.dim:
            raise _Mixes
        return int(rows[indices.dim])
    if operand.dim is None:
        raise _Mixes
    dim = operand.dim
    fixed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    size = eqn.invars[0].aval.shape[dim]
    if dim in fixed or dim in numbers.start_index_map or eqn.params["slice_sizes"][dim] != size:
        raise _Mixes
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
        raise _Mixes
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


# Branches and loops.


def _join(one: Rows, other: Rows) -> Rows:
    if one.dim is None and other.dim is None:
        return Rows(None, one.varies | other.varies)
    dims = {rows.dim for rows in (one, other) if rows.dim is not None}
    if len(dims) > 1 or any(rows.dim is None and dims & rows.varies for rows in (one, other)):
        raise _Mixes
    return Rows(next(iter(dims)))


def _cond(eqn: Any, given: list[Rows]) -> list[Rows]:
    if given[0].dim is not None:
        raise _Mixes
    made = [_walk(branch, given[1:]) for branch in eqn.params["branches"]]
    either = made[0]
    for other in made[1:]:
        either = [_join(*pair) for pair in zip(either, other, strict=True)]
    return either


def _settle(body: Callable[[list[Rows]], list[Rows]], start: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Iterate a loop's body to the fixpoint of its carry; return (carry, all outputs of the body)."""
    while True:
        made = body(start)
        after = [_join(*pair) for pair in zip(start, made, strict=False)]
        if after == start:
            return start, made
        start = after


def _while(eqn: Any, given: list[Rows]) -> list[Rows]:
    cond_count, body_count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, start = given[cond_count : cond_count + body_count], given[cond_count + body_count :]
    carry, _ = _settle(lambda carry: _walk(eqn.params["body_jaxpr"], [*consts, *carry]), start)
    (goes_on,) = _walk(eqn.params["cond_jaxpr"], [*given[:cond_count], *carry])
    if goes_on.dim is not None:
        raise _Mixes
    return carry


def _scan(eqn: Any, given: list[Rows]) -> list[Rows]:
    consts_count, carry_count = scan_counts(eqn.params)
    consts, start = given[:consts_count], given[consts_count : consts_count + carry_count]

    def of_one_iteration(one: Rows) -> Rows:
        if one.dim == 0:
            raise _Mixes  # the scan itself runs over the slices, which its carry may combine
        return Rows(one.dim and one.dim - 1, frozenset(dim - 1 for dim in one.varies if dim))

    rows = [of_one_iteration(one) for one in given[consts_count + carry_count :]]
    carry, made = _settle(lambda carry: _walk(eqn.params["jaxpr"], [*consts, *carry, *rows]), start)
    stacked = [
        Rows(None, frozenset({0, *(dim + 1 for dim in one.varies)})) if one.dim is None else Rows(one.dim + 1)
        for one in made[carry_count:]
    ]
    return [*carry, *stacked]


_CONTROL_FLOW: dict[str, Callable[[Any, list[Rows]], list[Rows]]] = {"cond": _cond, "scan": _scan, "while": _while}


# The program of one slice.

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding"})
"""Equation parameters that contain the size of a result, which may differ between L = count and L = 1."""


def _like(whole: Any, one: Any, count: int) -> bool:
    """Return whether two jaxprs are equal except that the stacked dimension has size `count` in one, 1 in the other."""
    (a, a_consts), (b, b_consts) = open_jaxpr(whole), open_jaxpr(one)
    if a_consts or b_consts or len(a.eqns) != len(b.eqns):
        return False
    twins: dict[Any, Any] = {}

    def pair_up(ones: Sequence[Any], others: Sequence[Any]) -> bool:
        twins.update(zip(ones, others, strict=False))
        return len(ones) == len(others) and all(fits(x.aval, y.aval) for x, y in zip(ones, others, strict=True))

    def fits(x: Any, y: Any) -> bool:
        sizes = zip(x.shape, y.shape, strict=False)
        same = all(size == other or (size, other) == (count, 1) for size, other in sizes)
        return x.dtype == y.dtype and len(x.shape) == len(y.shape) and same

    def same_atom(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) or isinstance(y, Literal):
            return isinstance(x, Literal) and isinstance(y, Literal) and bool(x.val == y.val)
        return twins[x] is y

    def same_param(key: str, x: Any, y: Any) -> bool:
        if key in _SIZES:
            return True
        if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
            return _like(x, y, count)
        if isinstance(x, (tuple, list)) and any(hasattr(each, "eqns") or hasattr(each, "jaxpr") for each in x):
            return len(x) == len(y) and all(_like(*pair, count) for pair in zip(x, y, strict=True))
        return repr(x) == repr(y)

    if not pair_up((*a.constvars, *a.invars), (*b.constvars, *b.invars)):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        atoms = len(x.invars) == len(y.invars) and all(map(same_atom, x.invars, y.invars))
        if x.primitive is not y.primitive or not atoms or x.params.keys() != y.params.keys():
            return False
        if not all(same_param(key, x.params[key], y.params[key]) for key in x.params):
            return False
        if not pair_up(x.outvars, y.outvars):
            return False
    return len(a.outvars) == len(b.outvars) and all(map(same_atom, a.outvars, b.outvars))
