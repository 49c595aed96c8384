"""Which results of a program are its arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.proofs.handed_through import handed_through


@jax.custom_jvp
def same(x):
    return x


same.defjvps(lambda tangent, _, x: tangent)

CASES = {
    "as it is": (lambda x, y: (y, x, x + y, 1.0), [1, 0, None, None]),
    "calls": (lambda x, y: jax.jit(jax.checkpoint(lambda x, y: (y, x * y, x)))(x, y), [1, None, 0]),
    "a derivative of its own": (lambda x, y: (same(y), jax.nn.relu(x)), [1, None]),
    "loop": (lambda x, y: lax.fori_loop(0, 2, lambda _, c: (c[0], c[1] + c[0]), (x, y)), [0, None]),
    "swapped in each iteration": (lambda x, y: lax.fori_loop(0, 2, lambda _, c: c[::-1], (x, y)), [None, None]),
    "while": (lambda x, y: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + y), (x, y)), [0, None]),
    "branches": (lambda x, y: lax.cond(y > 0, lambda x, y: (x, y), lambda x, y: (x, x), x, y), [0, None]),
    "scanned over": (lambda x, y: lax.scan(lambda c, z: (c, (z, z * c)), y, jnp.stack([x])), [1, None, None]),
    "copied": (lambda x, y: (jnp.array(x, copy=True), lax.optimization_barrier(y)), [0, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_which_results_are_arguments(name):
    fn, sources = CASES[name]
    assert list(handed_through(jax.make_jaxpr(fn)(1.0, 2.0))) == sources


def test_slices_that_a_scan_hands_on_are_what_it_was_given():
    program = jax.make_jaxpr(lambda xs: lax.scan(lambda c, x: (c + x, x), 0.0, xs, reverse=True))(jnp.arange(3.0))
    assert list(handed_through(program)) == [None, 0]


def test_rows_of_one_scan_are_not_those_of_another():
    """The inner scan stacks copies of a row of the outer one, and hands its own rows on."""

    def fn(xs):
        def row(c, x):
            return c, lax.scan(lambda d, one: (d, (one, x)), 0.0, x)[1]

        return lax.scan(row, 0.0, xs)[1]

    assert list(handed_through(jax.make_jaxpr(fn)(jnp.ones((3, 3))))) == [0, None]
