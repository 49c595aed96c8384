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
