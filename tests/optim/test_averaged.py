"""Averaged weights for evaluation, equal to the average kept by hand on one device (rtol 1e-6)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import model_order, normal

pytestmark = pytest.mark.fast_cases(1)

STRATEGIES = {"zero2": js.zero2(min_size=0), "ddp": js.ddp(), "fsdp": js.fsdp(min_size=0)}
BATCH = {"x": np.linspace(-1, 1, 16 * 5, dtype=np.float32).reshape(16, 5), "y": np.ones((16, 3), np.float32)}


def init_fn(key):
    return {"w": normal(0, 5, 3), "b": jnp.zeros(3), "frozen": jnp.ones(16)}


def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return js.Mean((error**2).sum(), error.size) + js.Mean(params["frozen"].sum(), 16.0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_averaged_run_evaluates_the_average_of_the_parameters(name):
    tx = js.optim.averaged(optax.sgd(0.1), 0.5)
    layout = js.layout(STRATEGIES[name], js.make_mesh(data=8), init_fn, tx, trainable=lambda path: path != "frozen")
    run, step = js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout)
    expected = model_order(layout.params, run.params)
    for _ in range(3):
        run, _ = step(run, BATCH)
        expected = jax.tree.map(lambda old, new: (old + new) / 2, expected, model_order(layout.params, run.params))

    average = js.averaged(run, layout)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), js.logical(average, layout).params, expected)
    evaluate = js.make_eval_step(lambda params, batch: {"loss": loss_fn(params, batch, None)}, layout)
    by_hand = jax.jit(lambda params: loss_fn(params, BATCH, None).value)(expected)
    np.testing.assert_allclose(evaluate(average, BATCH)["loss"].value, by_hand, rtol=1e-6)
    run, _ = step(run, BATCH)  # the run that was averaged goes on, and the average outlives it
    assert jnp.isfinite(average.params["frozen"]).all()


def test_an_optimizer_without_an_average_is_refused():
    tx = optax.sgd(0.1)
    layout = js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, tx)
    with pytest.raises(ValueError, match="averaged"):
        js.averaged(js.init(init_fn, tx, layout, 0), layout)
