"""bf16 and f16 parameters with an f32 original in the optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxshard import optim

from . import fast_jit


def make_params(dtype: Any = jnp.bfloat16) -> Any:
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (64, 8)).astype(dtype), "norm": jnp.ones(8), "count": jnp.zeros((), jnp.int32)}


def only_floats(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_are_the_rounded_originals_bit_for_bit(dtype: Any) -> None:
    """Exact: 100 steps of Adam on originals, which equal 100 steps on f32 parameters."""
    params = make_params(dtype)
    full = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, params)
    inner = optax.masked(optax.adamw(1e-2), only_floats)
    tx = optim.master(inner)

    @fast_jit
    def step(params: Any, state: Any, full: Any, inner_state: Any, key: Any) -> Any:
        grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape).astype(x.dtype), params)
        updates, state = tx.update(grads, state, params)
        wide = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, full)
        wide, inner_state = inner.update(wide, inner_state, full)
        return optax.apply_updates(params, updates), state, optax.apply_updates(full, wide), inner_state

    state, inner_state = tx.init(params), inner.init(full)
    for number in range(100):
        params, state, full, inner_state = step(params, state, full, inner_state, jax.random.key(number))
    assert params["w"].dtype == dtype and params["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(params["w"], state.master["w"].astype(dtype))
    np.testing.assert_array_equal(state.master["w"], full["w"])
    np.testing.assert_array_equal(params["norm"], full["norm"])


def test_memory() -> None:
    """12 bytes per bf16 parameter with Adam, 8 per f32 parameter: no second copy."""
    params = {"low": jax.ShapeDtypeStruct((1000,), jnp.bfloat16), "full": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    state = jax.eval_shape(optim.master(optax.adam(0.1)).init, params)
    arrays = [x for x in jax.tree.leaves(state) if x.shape]
    assert sum(x.size * x.dtype.itemsize for x in arrays) == 12 * 1000 + 8 * 1000
    assert {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.master)} == {"['low']"}


def test_tiny_steps_add_up() -> None:
    """In bf16 alone 1 + 1e-4 is 1; with an original a thousand such steps arrive, to 1 bf16 digit."""
    params = jnp.ones((1,), jnp.bfloat16)
    tx = optim.master(optax.sgd(1e-4))
    state = tx.init(params)
    step = fast_jit(lambda p, s: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(-jnp.ones_like(p), s, p)))
    for _ in range(1000):
        params, state = step(params, state)
    assert abs(float(params[0]) - 1.1) < 2**-7


def test_extra_arguments_and_missing_parameters() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: -u * value, updates), state

    tx = optim.master(optax.GradientTransformationExtraArgs(lambda params: (), update))
    params = jnp.zeros(3, jnp.bfloat16)
    updates, _ = tx.update(jnp.ones(3, jnp.bfloat16), tx.init(params), params, value=2.0)
    np.testing.assert_array_equal(updates, [-2.0] * 3)
    assert updates.dtype == jnp.float32
    with pytest.raises(ValueError, match="master: update needs the parameters"):
        tx.update(jnp.ones(3), tx.init(params))
