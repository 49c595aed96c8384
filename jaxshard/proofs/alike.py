"""Compare two jaxprs: do they compute a result by the same equations with the same literals?

It compares two traces of one function on inputs of different shapes: `n + x.shape[0]` is `n + 16` in one trace and
`n + 32` in the other, while `0.9 * teacher + 0.1 * w` is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxshard.core.jaxpr import inline_calls, open_jaxpr, results_alone

_COMPARED = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic)
"""Types of equation parameters to compare; parameters of other types, such as functions, differ between traces."""


def made_alike(one: Any, other: Any, result: int) -> bool:
    """Return True if two jaxprs compute the result at an index by the same equations with the same literals.

    Args:
      one: a closed jaxpr.
      other: a closed jaxpr with as many inputs and results, whose shapes may differ.
      result: the index of the result.
    """
    one, other = _alone(one, result), _alone(other, result)
    return _same(open_jaxpr(one)[0], open_jaxpr(other)[0], (one.consts, other.consts))


def _alone(program: Any, index: int) -> Any:
    """Return the closed jaxpr that computes only the result at `index`, with calls inlined."""
    alone, _ = results_alone(program, [open_jaxpr(program)[0].outvars[index]])
    opened = inline_calls(alone)
    return results_alone(opened, open_jaxpr(opened)[0].outvars)[0]


def _same(one: Any, other: Any, consts: tuple[Sequence[Any], Sequence[Any]] = ((), ())) -> bool:
    """Return whether two jaxprs are equal up to the names of their variables."""
    if len(one.invars) != len(other.invars) or len(one.outvars) != len(other.outvars):
        return False
    names: dict[Any, Any] = dict(zip(one.invars, other.invars))
    values = dict(zip(one.constvars, consts[0])), dict(zip(other.constvars, consts[1]))
    names |= dict(zip(one.constvars, other.constvars))

    def same_atoms(a: Any, b: Any) -> bool:
        if any(isinstance(atom, Literal) for atom in (a, b)):
            return type(a) is type(b) and _equal(a.val, b.val)
        known: Any = names.get(a)
        if known is not b or a.aval != b.aval:
            return False
        return a not in values[0] or _equal(values[0][a], values[1].get(b))

    # Skip equations without results, such as callbacks: no result depends on them.
    equations = [[eqn for eqn in jaxpr.eqns if eqn.outvars] for jaxpr in (one, other)]
    if len(equations[0]) != len(equations[1]):
        return False
    for a, b in zip(*equations):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            return False
        if not all(map(same_atoms, a.invars, b.invars)) or not _same_parameters(a.params, b.params):
            return False
        names |= dict(zip(a.outvars, b.outvars))
    return all(map(same_atoms, one.outvars, other.outvars))


def _same_parameters(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return bool(one.keys() == other.keys()) and all(_same_parameters(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_parameters, one, other))
    if hasattr(open_jaxpr(one)[0], "eqns") and hasattr(open_jaxpr(other)[0], "eqns"):
        (a, of_a), (b, of_b) = open_jaxpr(one), open_jaxpr(other)
        return _same(a, b, (of_a, of_b))
    return not isinstance(one, _COMPARED) or bool(one == other)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two literals or constants are equal; tracers, which have no value yet, are compared by shape."""
    if any(isinstance(x, jax.core.Tracer) for x in (one, other)):
        return bool(np.shape(one) == np.shape(other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))
