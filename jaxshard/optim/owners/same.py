"""Compare two jaxprs for equality, and count the FLOPs of one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.jaxpr import open_jaxpr


def same_program(one: Any, other: Any) -> bool:
    """Return whether two jaxprs are equal up to the names of their variables."""
    (a, a_consts), (b, b_consts) = open_jaxpr(one), open_jaxpr(other)
    if len(a_consts) != len(b_consts) or len(a.eqns) != len(b.eqns):
        return False
    if not all(x is y or np.array_equal(x, y) for x, y in zip(a_consts, b_consts, strict=True)):
        return False
    twins: dict[Any, Any] = {}
    return (
        _pair_up((*a.constvars, *a.invars), (*b.constvars, *b.invars), twins)
        and all(_same_equation(x, y, twins) for x, y in zip(a.eqns, b.eqns, strict=True))
        and _same_atoms(a.outvars, b.outvars, twins)
    )


def _pair_up(ones: Any, others: Any, twins: dict[Any, Any]) -> bool:
    """Record which variables correspond to each other; return False if their shapes or dtypes differ."""
    if len(ones) != len(others):
        return False
    twins.update(zip(ones, others, strict=True))
    return all(_kind(x.aval) == _kind(y.aval) for x, y in zip(ones, others, strict=True))


def _kind(aval: Any) -> tuple[Any, Any]:
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def _same_atoms(ones: Any, others: Any, twins: dict[Any, Any]) -> bool:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) or isinstance(y, Literal):
            both = isinstance(x, Literal) and isinstance(y, Literal) and _kind(x.aval) == _kind(y.aval)
            return both and (x.val is y.val or np.array_equal(x.val, y.val))
        return twins[x] is y

    return len(ones) == len(others) and all(map(same, ones, others))


def _same_equation(x: Any, y: Any, twins: dict[Any, Any]) -> bool:
    return (
        x.primitive is y.primitive
        and _same_atoms(x.invars, y.invars, twins)
        and x.params.keys() == y.params.keys()
        and all(_same_param(x.params[key], y.params[key]) for key in x.params)
        and _pair_up(x.outvars, y.outvars, twins)
    )


def _same_param(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_same_param, x, y))
    if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
        return (hasattr(y, "eqns") or hasattr(y, "jaxpr")) and same_program(x, y)
    return type(x) is type(y) and repr(x) == repr(y)


def product_flops(program: Any) -> int:
    """Count the FLOPs of the matrix products in a jaxpr; factorizations count as ten products of their size.

    A `while` loop counts as one iteration, a `cond` as its most expensive branch.
    """
    return sum(map(_flops, open_jaxpr(program)[0].eqns))


def _flops(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        contracted_size = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return 2 * int(eqn.outvars[0].aval.size) * int(contracted_size)
    if name in FACTORIZED:
        shape = eqn.invars[0].aval.shape
        return 20 * int(math.prod(shape)) * int(min(shape[-2:]))
    if name == "scan":
        return int(params["length"]) * product_flops(params["jaxpr"])
    if name == "cond":
        return max(map(product_flops, params["branches"]))
    return sum(map(product_flops, jaxprs_in_params(params)))


FACTORIZED = frozenset({"cholesky", "eig", "eigh", "lu", "qr", "geqrf", "svd", "schur", "hessenberg"})
