"""Sorts whose order nobody looks at: all that is made of the sorted values is a sum or an extreme over them.

    ordered = jnp.sort(nats, axis=0)        every device needs all rows for this
    loss = (2 * ordered).sum()              and the sum is the same without it

A sort over rows that are spread over devices gathers them, so that leaving it out saves a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.plan.repair.rewrite import bodies

_SIGNS_AND_SUMS = ("abs", "add", "div", "max", "min", "mul", "neg", "sign", "sub")
_FUNCTIONS = ("exp", "expm1", "integer_pow", "log", "log1p", "logistic", "sqrt", "square", "tanh")
_ELEMENTWISE = frozenset((*_SIGNS_AND_SUMS, *_FUNCTIONS, "convert_element_type", "copy", "stop_gradient"))
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


def needless_sorts(program: Any) -> Iterator[Any]:
    """Yield the equations of a traced function, nested ones included, that sort one array in an order nobody reads.

    Of several programs, by name, those of each.
    """
    if isinstance(program, dict):
        for one in program.values():
            yield from needless_sorts(one)
        return
    jaxpr = open_jaxpr(program)[0]
    for eqn in jaxpr.eqns:
        dim = _sorted_dim(eqn)
        if dim is not None and _order_is_free(jaxpr, eqn.outvars[0], dim):
            yield eqn
        for body in bodies(eqn):
            yield from needless_sorts(body)


def _sorted_dim(eqn: Any) -> int | None:
    """The dimension along which an equation sorts its only operand; None if it does something else."""
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "sort":
        return int(eqn.params["dimension"])
    inner = [one for body in bodies(eqn) for one in open_jaxpr(body)[0].eqns]
    return _sorted_dim(inner[0]) if len(inner) == 1 and eqn.primitive.name in ("jit", "pjit") else None


def _order_is_free(jaxpr: Any, var: Any, dim: int) -> bool:
    """Return True if no result of the program depends on the order of a variable's elements along a dimension."""
    dims = {var: dim}
    for eqn in jaxpr.eqns:
        used = [one for one in eqn.invars if not isinstance(one, Literal) and one in dims]
        if not used:
            continue
        name, at = eqn.primitive.name, dims[used[0]]
        if any(dims[one] != at for one in used):
            return False
        if name in _REDUCTIONS:
            if at not in eqn.params["axes"]:
                dims[eqn.outvars[0]] = at - sum(axis < at for axis in eqn.params["axes"])
        elif name in _ELEMENTWISE and all(one.aval.size == 1 or one in used for one in eqn.invars):
            dims[eqn.outvars[0]] = at
        else:
            return False
    return not any(one in dims for one in jaxpr.outvars if not isinstance(one, Literal))
