"""Parts of a traced program: what they depend on, and that they compute what the whole does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.core.jaxpr import CALLS, Program, assign, inline_calls, needed_equations, open_jaxpr, replay, subprogram

X, W = np.array([0.5, -2.0], np.float32), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def two_results(x, w):
    a = jnp.sin(x)
    return {"b": a @ w, "a": a, "number": 3.0}


@pytest.fixture
def program():
    return Program.trace(two_results, X, W)


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def test_running_a_part_gives_its_values_and_arrays_for_numbers(program):
    whole = two_results(X, W)
    got = program.run(program.out, assign(program.args, (X, W)))
    jax.tree.map(np.testing.assert_array_equal, got, whole)
    assert isinstance(got["number"], jax.Array) and got["number"].dtype == jnp.float32
    # From a value in the middle, without the arguments that made it.
    got = program.run(program.out["b"], {program.out["a"]: whole["a"], program.args[1]: W})
    np.testing.assert_array_equal(got, whole["b"])


def test_a_value_that_is_given_replaces_the_equation_that_makes_it(program):
    """`a` is doubled where it is made: in the product that reads it, beside the arguments that would make it."""
    whole = two_results(X, W)
    given = assign(program.args, (X, W)) | {program.out["a"]: 2 * whole["a"]}
    np.testing.assert_allclose(program.run(program.out["b"], given), 2 * whole["b"], rtol=1e-6)


def test_a_part_is_a_function_of_variables(program):
    (b,) = program.part([program.out["b"]], [program.out["a"], program.args[1]])(X, W)
    np.testing.assert_allclose(b, X @ W, rtol=1e-6)


def test_constants_are_filled_in():
    table = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: (x + table, x * 2))(1.0)
    jaxpr, consts = open_jaxpr(closed)
    eqns, _ = needed_equations(jaxpr.eqns, jaxpr.outvars[:1], set())
    assert len(consts) == 1 and len(eqns) < len(jaxpr.eqns)
    (found,) = subprogram(closed, jaxpr.outvars[:1], jaxpr.invars, eqns)(1.0)
    np.testing.assert_array_equal(found, table + 1)


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, dy: (dy * 2,))


@jax.custom_jvp
def tripled(x):
    return x * 3


tripled.defjvp(lambda primals, tangents: (tripled(*primals), tangents[0] * 3))


def calling(x):
    return jax.checkpoint(jax.jit(lambda x: jnp.sin(x)))(doubled(x)) + jax.jit(tripled)(x)


def test_calls_are_opened():
    closed = jax.make_jaxpr(calling)(X)
    flat = inline_calls(closed)
    assert sorted(names(open_jaxpr(flat)[0].eqns)) == ["add", "mul", "mul", "sin"]
    np.testing.assert_array_equal(jax.core.eval_jaxpr(flat.jaxpr, flat.consts, X)[0], calling(X))
    assert CALLS.keys() >= set(names(open_jaxpr(closed)[0].eqns)) - {"add"}


def test_a_rule_replaces_equations_inside_of_calls_too():
    def rule(equation, operands):
        return [operands[0] * 100] if equation.primitive.name == "sin" else None

    (found,) = replay(jax.make_jaxpr(calling)(X), [X], rule)
    np.testing.assert_allclose(found, 203 * X, rtol=1e-6)
