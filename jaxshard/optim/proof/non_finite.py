"""Detect optimizers that handle non-finite gradients themselves.

The check reads the jaxpr of `tx.update`, never names or classes. Such optimizers (`optax.apply_if_finite`,
`optax.zero_nans`, `optax.skip_not_finite`) test a value that depends on gradients by `is_finite x` (`jnp.isfinite`) or
`x != x` (`jnp.isnan`). Tests of other values, such as a quotient of learning rates in `schedule_free`, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.traced import traced_update
from jaxshard.proofs.walk import Domain, Place, walk


def handles_non_finite(tx: optax.GradientTransformation, params: PyTree) -> bool:
    """Return True if an optimizer checks gradients for inf and NaN itself, like `optax.apply_if_finite`.

    The jaxpr of its update then contains `is_finite` or `x != x` of a value that depends on gradients.

    Args:
      tx: an optax transform.
      params: the trained parameters, which may be abstract.

    Returns:
      True if there is such a check; False if not, or if `tx.update` can't be traced with only gradients, state and
      parameters.
    """
    params = abstract(params)
    try:
        program = traced_update(tx, params)[0]
    except (NameError, TypeError, ValueError):  # the step traces it with all arguments, and reports errors
        return False
    rest = len(program.in_avals) - len(jax.tree.leaves(params))
    tests = _Tests()
    walk(program, [True] * len(jax.tree.leaves(params)) + [False] * rest, tests)
    return tests.found


class _Tests(Domain[bool]):
    """Find whether a program tests a value that depends on gradients for inf or NaN; `found` is the result.

    The fact about a value is True if it depends on gradients.
    """

    found = False

    def value(self, values: Sequence[Any], place: Place) -> bool:
        return False

    def join(self, place: Place, facts: Sequence[bool]) -> bool:
        return any(facts)

    def rule(self, place: Place, facts: list[bool]) -> None:
        return None

    def conclude(self, place: Place, operands: list[bool], results: list[bool]) -> list[bool]:
        atoms = place.equation.invars
        is_test = place.name == "is_finite" or (place.name == "ne" and atoms[0] is atoms[1])
        self.found |= is_test and any(operands)
        return results
