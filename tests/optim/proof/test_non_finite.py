"""Which optimizers have a rule of their own for gradients that are not finite."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxshard.optim.proof.non_finite import handles_non_finite
from tests.optim.proof.aliases import ALIASES, TYPICAL, WRAPPERS

PARAMS = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("names", [TYPICAL, ALIASES | WRAPPERS], ids=["typical", "all"])
def test_of_optax_exactly_those_that_say_so(names):
    found = {name for name in names if handles_non_finite((ALIASES | WRAPPERS)[name](), PARAMS)}
    assert found == {"zero_nans", "apply_if_finite", "skip_not_finite"}


def replace_bad(test):
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: jnp.where(test(g), 0, g), grads), state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    "test",
    [
        jnp.isnan,
        lambda g: ~jnp.isfinite(g),
        lambda g: ~jnp.isfinite(jnp.sum(g)),
        lambda g: jax.lax.cond(g.sum() > 1, jnp.isnan, lambda g: g != 0, g),
        lambda g: jax.lax.map(jax.jit(jnp.isnan), g),
        lambda g: jax.lax.while_loop(lambda i: jnp.isnan(g[i, 0] if g.ndim > 1 else g[i]), lambda i: i + 1, 0) > 0,
    ],
    ids=["isnan", "isfinite", "sum", "branch", "map", "while"],
)
def test_a_rule_of_ones_own_is_found_in_every_kind_of_program(test):
    assert handles_non_finite(optax.chain(replace_bad(test), optax.sgd(0.1)), PARAMS)


def test_what_depends_on_no_gradient_is_no_rule():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g * jnp.where(jnp.isfinite(state), 1.0, 0.5), grads), state + 1

    assert not handles_non_finite(optax.GradientTransformation(lambda params: jnp.zeros(()), update), PARAMS)


def test_an_optimizer_that_needs_more_than_gradients_is_not_judged():
    def update(grads, state, params=None, *, value):
        return jax.tree.map(lambda g: jnp.where(jnp.isnan(g), value, g), grads), state

    assert not handles_non_finite(optax.GradientTransformationExtraArgs(lambda params: (), update), PARAMS)


def test_an_optimizer_that_names_a_mesh_axis_is_not_judged():
    """What runs inside `shard_map` alone is refused later, with a text of its own."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads), state

    assert not handles_non_finite(optax.GradientTransformation(lambda params: (), update), PARAMS)
