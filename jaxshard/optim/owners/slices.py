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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.primitives import ELEMENTWISE, SAME
from jaxshard.optim.owners.cores import Core
from jaxshard.proofs.alike import same_programs
from jaxshard.proofs.dims import follow_dim
from jaxshard.proofs.walk import Domain, Place, Refused, walk


class Rows(NamedTuple):
    """The stacked dimension of a value, in a program that updates the matrices of a stacked array [L, m, n].

    Attributes:
      dim: the dimension of size L: slice s along it depends only on slice s of the program's inputs. None for a value
        that depends on no slice, such as a constant.
      varies: if `dim` is None, the dimensions along which the value is not constant.
    """

    dim: int | None
    varies: frozenset[int] = frozenset()


def has_own_slices(core: Core, count: int) -> tuple[bool, ...] | None:
    """Prove that the matrices of a stacked parameter [count, ...] are updated independently of each other.

    That is: slice s of every output of the core (the operations that need full matrices) depends only on slice s of its
    inputs.

    Args:
      core: The core of the parameter's update.
      count: The number of slices.

    Returns:
      For each element of `core.shared` (inputs that every device has), True if it has an entry for each slice, False if
      every slice uses all of it. None if the proof fails.
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
    """Find the stacked dimension of every value in a jaxpr; refuse operations that mix slices or that are unknown."""

    def value(self, values: Sequence[Any], place: Place) -> Rows:
        return _without_slices(values[0])

    def join(self, place: Place, facts: Sequence[Rows]) -> Rows:
        if all(one.dim is None for one in facts):
            return Rows(None, frozenset().union(*(one.varies for one in facts)))
        dims = {one.dim for one in facts if one.dim is not None}
        if len(dims) > 1 or any(one.dim is None and dims & one.varies for one in facts):
            raise Refused
        return Rows(dims.pop())

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
    """Return the dimensions along which the result `out` of an equation is not constant.

    The operands, which `given` describes, depend on no slice.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE or name in SAME:
        return frozenset().union(*(one.varies for one in given))
    if name == "broadcast_in_dim":
        return frozenset(eqn.params["broadcast_dimensions"][dim] for dim in given[0].varies)
    if name == "iota":
        return frozenset({eqn.params["dimension"]})
    return frozenset(range(len(out.aval.shape)))


def _after(eqn: Any, given: list[Rows]) -> int:
    """Return the stacked dimension of an equation's results, given the stacked dimensions of its operands.

    Raises:
      Refused: the equation mixes slices.
    """
    found = {follow_dim(eqn, operand, one.dim) for operand, one in enumerate(given) if one.dim is not None}
    dim = found.pop()
    if found or dim is None:
        raise Refused
    # Operands without slices must be constant along the dimensions that meet the slices.
    for operand, one in enumerate(given):
        if one.dim is None and any(follow_dim(eqn, operand, other) == dim for other in one.varies):
            raise Refused
    return dim


# The program of one slice.

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding"})
"""Equation parameters that contain the size of a result, which may differ between the programs of L and 1 slices."""


def is_program_of_one(whole: Core, one: Core, count: int) -> bool:
    """Return True if a stacked parameter [count, ...] and a single slice [1, ...] are updated by the same operations.

    Args:
      whole: the core (the operations that need full matrices) for the shape [count, ...].
      one: the core for the shape [1, ...].
      count: the number of slices.
    """

    def same_type(x: Any, y: Any) -> bool:
        sizes = zip(x.shape, y.shape, strict=False)
        same = all(size == other or (size, other) == (count, 1) for size, other in sizes)
        return x.dtype == y.dtype and len(x.shape) == len(y.shape) and same

    sizes = [(len(core.ins), core.states, len(core.shared), len(core.outs)) for core in (whole, one)]
    return sizes[0] == sizes[1] and same_programs(whole.program, one.program, same_type=same_type, ignored=_SIZES)
