"""Mistakes that are easily made with a run, a layout or a batch: refused by name, or harmless."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

TX = optax.sgd(0.1)
BATCH = {"x": np.linspace(-1, 1, 16 * 7, dtype=np.float32).reshape(16, 7), "scale": 2.0}


def init_fn(key):
    return {"w": jax.random.normal(key, (7,))}


def loss_fn(params, batch, key):
    return js.Mean((batch["scale"] * (batch["x"] @ params["w"]) ** 2).sum(), batch["x"].shape[0])


def made(strategy):
    layout = js.layout(strategy, js.make_mesh(data=8), init_fn, TX)
    return layout, js.init(init_fn, TX, layout, 0)


def test_a_run_that_was_donated_is_refused_and_the_process_lives():
    layout, run = made(js.fsdp(min_size=0))
    step = js.make_step(loss_fn, TX, layout)
    after, _ = step(run, BATCH)
    with pytest.raises(ValueError, match=r"donated to an earlier step.*go on with the run it returned"):
        step(run, BATCH)
    after, metrics = step(after, BATCH)
    assert jnp.isfinite(metrics["loss"])


def test_a_run_is_read_with_its_own_layout_alone():
    _, run = made(js.fsdp(min_size=0))
    other, _ = made(js.ddp())
    with pytest.raises(ValueError, match=r"(?s)the run does not fit the layout.*params/w.*\[7\].*\[8\]"):
        js.logical(run, other)


@pytest.mark.parametrize("rows", [16, 5])
def test_evaluation_takes_python_scalars_and_keeps_integers(rows):
    layout, run = made(js.fsdp(min_size=0))

    def eval_fn(params, batch):
        largest = jnp.max(jnp.round(100 * batch["x"])).astype(jnp.int32)
        return {"loss": loss_fn(params, batch, None), "largest": js.Max(largest)}

    evaluate = js.make_eval_step(eval_fn, layout)
    evaluate(run, BATCH)
    batch = BATCH | {"x": BATCH["x"][:rows]}
    result = evaluate(run, batch)
    expected = eval_fn(js.logical(run, layout).params, batch)
    np.testing.assert_allclose(result["loss"].value, expected["loss"].value, rtol=1e-6)
    assert result["largest"].value.dtype == jnp.int32
    assert int(result["largest"].value) == int(expected["largest"].value)


def test_a_strategy_that_was_not_called_is_named():
    with pytest.raises(TypeError, match=r"write js.fsdp\(...\), not js.fsdp"):
        js.layout(js.fsdp, js.make_mesh(data=8), init_fn, TX)


def test_a_single_role_need_not_be_a_list():
    assert js.shard("data", "opt") == js.shard("data", ["opt"])


def test_init_from_casts_nothing():
    layout, _ = made(js.fsdp())
    with pytest.raises(ValueError, match=r"(?s)other dtypes.*w: float64, expected float32"):
        js.init(init_fn, TX, layout, 0, init_from={"w": np.zeros(7)})


def test_a_loss_that_names_an_axis_it_does_not_run_over():
    """A module made for pmap, such as BatchNorm(axis_name="batch")."""
    layout, run = made(js.fsdp(min_size=0))

    def pmapped(params, batch, key):
        return js.Mean(jax.lax.pmean((batch["x"] @ params["w"]).sum(), "batch"), batch["x"].shape[0])

    for engine in (js.auto(), js.explicit()):
        with pytest.raises(ValueError, match=r"names an axis .*batch.* without axis_name.* of the batch: 'data'"):
            js.make_step(pmapped, TX, layout, engine=engine)(run, BATCH)
