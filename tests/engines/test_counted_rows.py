"""A mean whose weight does not count the rows at hand is refused where a batch is computed in parts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1)
WEIGHT = r"the weight of js.Mean is no sum over rows: that of the whole batch is {}, those of its {} parts add up to {}"


def init(key):
    return {"embed": jnp.ones((5, 6)), "block": jnp.eye(6), "head": jnp.ones((6, 3))}


def head_of(weight_of):
    def head(params, x, batch, key):
        nats = js.cross_entropy(x @ params["head"], batch["y"])
        return js.Mean(nats.sum(), weight_of(nats))

    return head


def model_of(weight_of):
    embed = lambda params, batch, key: batch["x"] @ params["embed"]  # noqa: E731
    return js.Stacked(embed, lambda w, x, key: x + jnp.tanh(x @ w), head_of(weight_of), 2, init)


ENGINES = {
    "explicit": ({"data": 8}, js.fsdp(min_size=0), js.explicit(), 8),
    "micro-batches": ({"data": 2}, js.ddp(), js.explicit(microbatches=4, scatter="end"), 8),
    "auto": ({"data": 4}, js.ddp(), js.auto(microbatches=2), 2),
    "pipelined": (
        {"data": 2, "pipe": 2},
        js.compose(js.fsdp(min_size=0), js.pipeline(chunks=1)),
        js.pipelined(microbatches=2),
        4,
    ),
    "replicas": ({"replica": 2, "data": 2}, js.compose(js.ddp(), js.local(every=2)), js.explicit(), 2),
}
BATCH = {"x": np.ones((16, 5), np.float32), "y": np.zeros(16, np.int32)}


def mesh_of(axes):
    return js.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)


def compiled(model, name, loss=None):
    axes, strategy, engine, _ = ENGINES[name]
    layout = js.layout(strategy, mesh_of(axes), model.init, TX)
    step = js.make_step(loss or model.loss, TX, layout, engine=engine)
    return step.compile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH))


@pytest.mark.parametrize("name", ENGINES)
def test_a_fixed_weight_is_refused_with_both_numbers(name):
    parts = ENGINES[name][-1]
    with pytest.raises(TypeError, match=WEIGHT.format(16, parts, 16 * parts)):
        compiled(model_of(lambda nats: 16.0), name)


def test_where_the_whole_batch_is_seen_any_weight_is_right():
    model = model_of(lambda nats: 16.0)
    expected = float(jax.jit(lambda key: model.loss(model.init(key), BATCH, None).value)(jax.random.key(0)))
    layout = js.layout(js.ddp(), mesh_of({"data": 8}), model.init, TX)
    _, metrics = js.make_step(model.loss, TX, layout, engine=js.auto())(js.init(model.init, TX, layout, 0), BATCH)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)
    layout = js.layout(js.ddp(), mesh_of({"data": 1}), model.init, TX)
    js.make_step(model.loss, TX, layout, engine=js.explicit()).lower(BATCH)


def test_a_penalty_and_a_mean_of_means_stay_right_beside_each_other():
    """Within 1e-6 of one device."""
    model = model_of(lambda nats: nats.size)

    def loss(params, batch, key):
        mean = model.loss(params, batch, key)
        half = js.Mean(jnp.square(batch["x"] @ params["embed"]).mean(), 1)
        return mean + 0.1 * half + js.Mean(jnp.square(params["head"]).sum(), 1)

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, TX)
    step = js.make_step(loss, TX, layout, engine=js.explicit(microbatches=2))
    _, metrics = step(js.init(model.init, TX, layout, 0), BATCH)
    expected = jax.jit(lambda key: loss(model.init(key), BATCH, None).value)(jax.random.key(0))
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)


def test_metrics_of_an_evaluation_of_single_rows_are_checked_too():
    """A short batch is evaluated row by row, where a weight of 16 would count 16 rows for each."""
    model = model_of(lambda nats: nats.size)
    layout = js.layout(js.ddp(), js.make_mesh(data=8), model.init, TX)
    run = js.init(model.init, TX, layout, 0)

    def eval_fn(params, batch):
        return {"loss": model.evaluate(params, batch)["loss"], "hits": js.Mean((batch["y"] == 0).sum(), 16)}

    eval_step = js.make_eval_step(eval_fn, layout)
    assert js.evaluate(eval_step, run, [BATCH])["hits"] == 1
    with pytest.raises(TypeError, match="the metric 'hits': " + WEIGHT.format(16, 16, 256)):
        eval_step(run, {name: x[:5] for name, x in BATCH.items()})
    ordered = js.make_eval_step(eval_fn, layout, engine=js.explicit(reduction="ordered"))
    with pytest.raises(TypeError, match="the metric 'hits': " + WEIGHT.format(16, 8, 128)):
        ordered(run, BATCH)
