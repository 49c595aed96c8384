"""The moving average of the parameters, as optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxshard import optim

from . import fast_jit


def run(tx: Any, params: Any, steps: int = 5) -> tuple[list[Any], Any]:
    @fast_jit
    def step(params: Any, state: Any, key: Any) -> Any:
        grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape).astype(x.dtype), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, seen = tx.init(params), [params]
    for number in range(steps):
        params, state = step(params, state, jax.random.key(number))
        seen.append(params)
    return seen, state


def test_the_average() -> None:
    """To 1e-6: the recursion on the parameters after every step, from the initial ones."""
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(())}
    seen, state = run(optim.averaged(optax.adam(0.1), 0.7), params)
    plain, _ = run(optax.adam(0.1), params)
    jax.tree.map(np.testing.assert_array_equal, seen[-1], plain[-1])
    expected = params
    for moved in seen[1:]:
        expected = jax.tree.map(lambda a, p: 0.7 * a + (1 - 0.7) * p, expected, moved)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), optim.averaged_params(state), expected)
    assert jax.tree.structure(optim.averaged_params(tx_state(params))) == jax.tree.structure(params)


def test_a_decay_that_is_a_schedule() -> None:
    """To 1e-6: with 0.1, 0.2, 0.3 ... the recursion on the parameters after every step. js.Average takes the same."""
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    seen, state = run(optim.averaged(optax.sgd(0.1), lambda step: 0.1 * (step + 1)), params, steps=3)
    expected = params["w"]
    for decay, moved in zip((0.1, 0.2, 0.3), seen[1:], strict=True):
        expected = decay * expected + (1 - decay) * moved["w"]
    np.testing.assert_allclose(optim.averaged_params(state)["w"], expected, rtol=1e-6)
    assert state.count == 3 and optim.averaged(optax.sgd(0.1), 0.9).init(params).count == ()


def tx_state(params: Any) -> Any:
    deep = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.1), optim.averaged(optax.adam(0.1), 0.9))
    return optax.MultiSteps(deep, 2).init(params)


def test_low_precision_and_integers() -> None:
    params = {"w": jnp.full((4,), 3.0, jnp.bfloat16), "n": jnp.asarray(2, jnp.int32)}
    tx = optim.averaged(optax.set_to_zero(), 0.999)
    _, state = run(tx, params)
    average = optim.averaged_params(state)
    assert average["w"].dtype == jnp.float32 and average["n"].dtype == jnp.int32
    np.testing.assert_array_equal(average["w"], [3.0] * 4)  # the average of equal numbers is that number
    assert average["n"] == 2


def test_refused() -> None:
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        optim.averaged(optax.sgd(0.1), 1.5)
    with pytest.raises(ValueError, match="found 0"):
        optim.averaged_params(optax.adam(0.1).init(params))
    with pytest.raises(ValueError, match="found 2"):
        optim.averaged_params([optim.averaged(optax.sgd(0.1), 0.9).init(params)] * 2)
    tx = optim.averaged(optax.sgd(0.1), 0.9)
    with pytest.raises(ValueError, match="averaged: update needs"):
        tx.update(params, tx.init(params))
    nested = optim.averaged(optim.averaged(optax.sgd(0.1), 0.5), 0.9).init(params)
    with pytest.raises(ValueError, match="found 2"):
        optim.averaged_params(nested)
