"""Detect optimizers that handle non-finite gradients themselves.

It reads the jaxpr of `tx.update`, never names or classes. Such optimizers (`optax.apply_if_finite`, `optax.zero_nans`,
`optax.skip_not_finite`) test a value that depends on gradients by `is_finite x` (`jnp.isfinite`) or `x != x`
(`jnp.isnan`). Tests of other values, such as a quotient of learning rates in `schedule_free`, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.traced import traced_update


def handles_non_finite(tx: optax.GradientTransformation, params: PyTree) -> bool:
    """Return whether the update of a transform tests values that depend on gradients for being finite.

    Args:
      tx: an optax transform.
      params: the trained parameters, which may be abstract.

    Returns:
      True if it does; False otherwise, or if `tx.update` can't be traced with only gradients, state and parameters.
    """
    params = abstract(params)
    try:
        program = traced_update(tx, params)[0]
    except (NameError, TypeError, ValueError):  # the step traces it with all arguments, and reports errors
        return False
    rest = len(program.in_avals) - len(jax.tree.leaves(params))
    return _contains_test(program, [True] * len(jax.tree.leaves(params)) + [False] * rest)


def _contains_test(program: Any, depends: Sequence[bool]) -> bool:
    """Return whether a jaxpr tests a value that depends on the inputs for which `depends` is True."""
    jaxpr, _ = open_jaxpr(program)
    found = {var for var, marked in zip(jaxpr.invars, depends, strict=True) if marked}
    for equation in jaxpr.eqns:
        marks = [not isinstance(atom, Literal) and atom in found for atom in equation.invars]
        if not any(marks):
            continue
        name, operands = equation.primitive.name, equation.invars
        if name == "is_finite" or (name == "ne" and operands[0] is operands[1]):
            return True
        for inner in jaxprs_in_params(equation.params):
            # The inputs of a call are its operands. Loops and branches pass only some operands: mark all inputs.
            count = len(open_jaxpr(inner)[0].invars)
            if _contains_test(inner, marks if count == len(marks) else [True] * count):
                return True
        found.update(equation.outvars)
    return False
