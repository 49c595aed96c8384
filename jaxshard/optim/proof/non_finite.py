"""Detection of optimizers with a rule of their own for gradients that are not finite.

It reads the program of `tx.update`, never names or classes.
`optax.apply_if_finite`, `optax.zero_nans` and `optax.skip_not_finite` have a rule of their own for gradients that are
not finite. Such a rule is a test, `is_finite x` (`jnp.isfinite`) or `x != x` (`jnp.isnan`), of a number that depends on
gradients. A test of anything else, such as that of a quotient of learning rates in `schedule_free`, is none.
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
    """Return whether the update of a transform tests numbers that depend on gradients for being finite.

    Args:
      tx: an optax transform.
      params: the trained parameters, which may be abstract.

    Returns:
      True if it does; False too where `tx.update` can't be traced with gradients, state and parameters alone.
    """
    params = abstract(params)
    try:
        program = traced_update(tx, params)[0]
    except (NameError, TypeError, ValueError):  # the step, which traces it with all that it has, tells what is wrong
        return False
    rest = len(program.in_avals) - len(jax.tree.leaves(params))
    return _contains_test(program, [True] * len(jax.tree.leaves(params)) + [False] * rest)


def _contains_test(program: Any, depends: Sequence[bool]) -> bool:
    """Return whether a program tests anything that depends on those of its arguments that are marked."""
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
            # The arguments of a call are its operands. Those of loops and branches are some of them: all are marked.
            count = len(open_jaxpr(inner)[0].invars)
            if _contains_test(inner, marks if count == len(marks) else [True] * count):
                return True
        found.update(equation.outvars)
    return False
