"""Compare two jaxprs: are they the same equations on the same operands?

A comparison of two traces of one function on inputs of different shapes shows what depends on the shapes:
`n + x.shape[0]` is `n + 16` in one trace and `n + 32` in the other; `0.9 * teacher + 0.1 * w` is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxshard.core.compat import without_callbacks
from jaxshard.core.jaxpr import inline_calls, open_jaxpr, results_alone, variables

_FUNCTIONS = frozenset({"name", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "computation"})
"""Parameters with functions, which differ from trace to trace, or their names; a jaxpr stands next to each of them."""


class Difference(NamedTuple):
    """The first difference between two jaxprs.

    Attributes:
      what: the kind of difference. "inputs": the jaxprs have different numbers of inputs. "equation": two equations at
        the same position have different primitives or parameters. "operands": these equations read different variables.
        "length": one jaxpr has more equations. "results": the jaxprs return different variables.
      equations: the two equations that differ; for "length" and "results" one equation, twice. () if no equation is to
        blame, as for "inputs".
    """

    what: Literal["inputs", "equation", "operands", "length", "results"]
    equations: tuple[Any, ...] = ()


def first_difference(
    one: Any, other: Any, same: Callable[[Any, Any], bool], same_literals: Callable[[Any, Any], bool] | None = None
) -> Difference | None:
    """Return the first difference between two jaxprs; None if they are the same program.

    Variables are matched by position: the first input of one jaxpr with the first input of the other, and so on.

    Args:
      one, other: the jaxprs, not closed.
      same: `same(equation, other)` compares parameters and result types; it is called for two equations that have the
        same primitive and the same operands.
      same_literals: `same_literals(literal, other)` compares two literals. By default their values are not compared.
    """
    twins: dict[Any, Any] = {}

    def are_twins(these: Sequence[Any], those: Sequence[Any]) -> bool:
        return len(these) == len(those) and all(map(is_twin, these, those))

    def is_twin(this: Any, that: Any) -> bool:
        if isinstance(this, core.Literal) and isinstance(that, core.Literal):
            return same_literals is None or same_literals(this, that)
        return not isinstance(this, core.Literal) and twins.get(this) is that

    for these, those in ((one.constvars, other.constvars), (one.invars, other.invars)):
        if len(these) != len(those):
            return Difference("inputs")
        twins.update(zip(these, those, strict=True))
    for pair in zip(one.eqns, other.eqns, strict=False):
        a, b = pair
        if a.primitive is not b.primitive or (len(a.invars), len(a.outvars)) != (len(b.invars), len(b.outvars)):
            return Difference("equation", pair)
        if not are_twins(a.invars, b.invars):
            return Difference("operands", pair)
        if not same(a, b):
            return Difference("equation", pair)
        twins.update(zip(a.outvars, b.outvars, strict=True))
    if len(one.eqns) != len(other.eqns):
        longer = max(one.eqns, other.eqns, key=len)[min(len(one.eqns), len(other.eqns))]
        return Difference("length", (longer, longer))
    if not are_twins(one.outvars, other.outvars):
        made = [eqn for eqn in one.eqns if not set(eqn.outvars).isdisjoint(variables(one.outvars))]
        return Difference("results", tuple(made[-1:] * 2))
    return None


def same_programs(
    one: Any,
    other: Any,
    *,
    same_type: Callable[[Any, Any], bool] | None = None,
    ignored: frozenset[str] = frozenset(),
) -> bool:
    """Return whether two jaxprs consist of the same equations, with the same literals, constants and parameters.

    Args:
      one, other: the jaxprs, closed or not.
      same_type: compares the types of two variables; by default their shapes and dtypes.
      ignored: the names of parameters that are not compared.
    """
    (a, a_consts), (b, b_consts) = open_jaxpr(one), open_jaxpr(other)
    are_same = same_type or _same_type

    def same_types(ones: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(ones) == len(others) and all(are_same(x.aval, y.aval) for x, y in zip(ones, others, strict=True))

    def same_parameters(x: Any, y: Any) -> bool:
        if x is y:
            return True
        if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            return len(x) == len(y) and all(map(same_parameters, x, y))
        if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
            return same_programs(x, y, same_type=same_type, ignored=ignored)
        return type(x) is type(y) and repr(x) == repr(y)

    def same_equations(x: Any, y: Any) -> bool:
        compared = x.params.keys() - ignored - _FUNCTIONS
        alike = x.params.keys() == y.params.keys() and all(same_parameters(x.params[n], y.params[n]) for n in compared)
        return alike and same_types(x.outvars, y.outvars)

    def same_literals(x: Any, y: Any) -> bool:
        return are_same(x.aval, y.aval) and _equal(x.val, y.val)

    inputs = same_types([*a.constvars, *a.invars], [*b.constvars, *b.invars])
    constants = len(a_consts) == len(b_consts) and all(map(_equal, a_consts, b_consts))
    return inputs and constants and first_difference(a, b, same_equations, same_literals) is None


def made_alike(one: Any, other: Any, result: int) -> bool:
    """Return whether two traces of a function compute one result in the same way: by the same equations and literals.

    For example, `n + x.shape[0]` traced with two sizes of x is `n + 16` and `n + 32`: not the same.

    Args:
      one: a closed jaxpr.
      other: a closed jaxpr with as many inputs and results, whose shapes may differ.
      result: the index of the result.
    """
    return same_programs(_alone(one, result), _alone(other, result), ignored=frozenset({"callback"}))


def _alone(program: Any, index: int) -> Any:
    """Return the jaxpr that computes only the result with this index, with all calls inlined."""
    alone, _ = results_alone(without_callbacks(program), [open_jaxpr(program)[0].outvars[index]])
    opened = inline_calls(alone)
    return results_alone(opened, open_jaxpr(opened)[0].outvars)[0]


def _same_type(one: Any, other: Any) -> bool:
    return all(getattr(one, name, None) == getattr(other, name, None) for name in ("shape", "dtype"))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two constants are equal. Tracers have no values yet, so only their shapes are compared."""
    if one is other or any(isinstance(x, jax.core.Tracer) for x in (one, other)):
        return bool(np.shape(one) == np.shape(other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))
