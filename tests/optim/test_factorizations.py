"""Loops over single matrices in place of factorizations of several: the same bits, in branches and loops too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params

from jaxshard.core.jaxpr import open_jaxpr, replay
from jaxshard.optim.factorizations import one_matrix_at_a_time
from jaxshard.proofs.dims import FACTORIZATIONS


def _factorized(program: Any) -> list[tuple[int, ...]]:
    """The shapes of what is factorized in a program, and in the programs inside it."""
    found = []
    for eqn in open_jaxpr(program)[0].eqns:
        if eqn.primitive.name in FACTORIZATIONS:
            found.append(tuple(eqn.invars[0].aval.shape))
        for inner in jaxprs_in_params(eqn.params):
            found += _factorized(inner)
    return found


def _decompose(x: jax.Array) -> Any:
    """Factorize [2, 3, n, n] here, in a branch, and in the turns of a loop."""
    roots = jnp.linalg.cholesky(x)
    chosen = lax.cond(x[0, 0, 0, 0] > 0, lambda: jnp.linalg.qr(x)[0], lambda: x)
    turned, _ = lax.scan(lambda carry, _: (jnp.linalg.eigh(carry)[1], None), x, length=2)
    return roots, chosen, turned


def test_batches_are_factorized_one_matrix_at_a_time_with_the_same_bits() -> None:
    a = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    x = jnp.asarray(a @ a.swapaxes(-1, -2) + np.eye(4, dtype=np.float32))
    closed = jax.make_jaxpr(_decompose)(x)
    single = one_matrix_at_a_time(closed)
    assert {len(shape) for shape in _factorized(closed)} == {4}
    assert {len(shape) for shape in _factorized(single)} == {2}
    for one, other in zip(jax.jit(lambda x: replay(single, [x]))(x), jax.jit(_decompose)(x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_program_without_batches_is_left_as_it_is() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.linalg.eigh(x)[1] @ x)(jnp.eye(4))
    assert one_matrix_at_a_time(closed) is closed
