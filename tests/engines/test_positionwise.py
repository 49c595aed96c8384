"""Engines under a context refuse a loss that mixes positions, with all places, before anything runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

ROWS, LENGTH, WIDTH = 4, 16, 8
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, WIDTH, (ROWS, LENGTH)).astype(np.int32),
    "targets": np.random.default_rng(1).integers(0, WIDTH, (ROWS, LENGTH)).astype(np.int32),
}
TX = optax.sgd(0.1)


def init(key):
    return {"table": jax.random.normal(key, (WIDTH, WIDTH)), "out": jax.random.normal(key, (WIDTH, WIDTH))}


def embed(params, tokens):
    return params["table"][tokens]


def cross_entropy(params, x, targets):
    nats = js.cross_entropy(x @ params["out"], targets)
    return js.Mean(nats.sum(), nats.size)


def mixing_loss(params, batch, key):
    x = embed(params, batch["tokens"])
    x = x + jnp.arange(x.shape[1])[:, None] / 9
    x = x + jnp.roll(x, 1, 1)
    return cross_entropy(params, x, batch["targets"])


def mesh_of(**axes):
    return js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)


def step_of(loss_fn, engine, init_fn=init, *more, **axes):
    axes = axes or {"data": 2, "context": 2}
    parts = [js.fsdp(tuple(axis for axis in axes if axis != "pipe"), min_size=0), js.context("context"), *more]
    layout = js.layout(js.compose(*parts), mesh_of(**axes), init_fn, TX)
    return js.make_step(loss_fn, TX, layout, engine=engine)


def test_all_places_are_in_the_error():
    with pytest.raises(ValueError, match="treats them one by one") as caught:
        step_of(mixing_loss, js.explicit(microbatches=2)).compile(BATCH)
    text = str(caught.value)
    first = mixing_loss.__code__.co_firstlineno
    assert f"engines/test_positionwise.py:{first + 2}: iota" in text
    assert f"engines/test_positionwise.py:{first + 3}: slice i32" not in text
    assert f"engines/test_positionwise.py:{first + 3}: slice f32[1,16,8]" in text  # of a micro-batch of a device
    assert "js.positions" in text
    assert "js.auto()" in text


def test_other_engines_and_contexts_of_one_device_do_not_ask():
    step_of(mixing_loss, js.explicit(), data=4, context=1).compile(BATCH)


def stacked(block):
    def head(params, x, batch, key):
        return cross_entropy({"out": params["head"]}, x, batch["targets"])

    def init_fn(key):
        draw = jax.random.normal(key, (WIDTH, WIDTH)) / 3
        return {"embed": draw, "block": {"w": draw}, "head": draw}

    return js.Stacked(lambda p, b, key: p["embed"][b["tokens"]], block, head, 2, init_fn)


def test_blocks_of_a_pipeline_are_read_too():
    model = stacked(lambda p, x, key: x + jax.nn.softmax(x @ p["w"], axis=1))
    step = step_of(
        model.loss, js.pipelined(microbatches=2), model.init, js.pipeline("pipe", chunks=1), data=1, context=2, pipe=2
    )
    with pytest.raises(ValueError, match=r"reduce_max f32\[2,16,8\] -> f32\[2,8\] is a maximum over the positions"):
        step.compile(BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, 2])
def test_evaluation_in_stages_is_read_too(axis):
    model = stacked(lambda p, x, key: x + jax.nn.softmax(x @ p["w"], axis=axis))
    strategy = js.compose(js.context("context"), js.pipeline("pipe", chunks=1))
    layout = js.layout(strategy, mesh_of(context=2, pipe=2), model.init, TX)
    step = js.make_eval_step(model.evaluate, layout)
    run = js.init(model.init, TX, layout, 0)
    if axis == 1:
        with pytest.raises(ValueError, match="is a maximum over the positions"):
            step(run, BATCH)
    else:
        assert np.isfinite(step(run, BATCH)["loss"].value)


def test_an_evaluation_in_which_devices_see_their_own_positions_is_read_too():
    def evaluate(params, batch):
        x = embed(params, batch["tokens"])
        return {"loss": cross_entropy(params, x - x.mean(1, keepdims=True), batch["targets"])}

    strategy = js.compose(js.ddp("data"), js.context("context", how="ulysses"))
    layout = js.layout(strategy, mesh_of(data=2, context=2), init, TX)
    run = js.init(init, TX, layout, 0)
    step = js.make_eval_step(evaluate, layout, engine=js.explicit(reduction="ordered"))
    with pytest.raises(ValueError, match=r"reduce_sum f32\[2,16,8\] -> f32\[2,8\] is a sum over the positions"):
        step(run, BATCH)
