"""A loss is traced as often as its gradient needs it: the checks of its means and of its state read that trace."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

TX = optax.sgd(0.1)
BATCH = {"x": np.ones((32, 5), np.float32), "y": np.zeros(32, np.int32)}
STATE = {"mean": jnp.zeros(3), "seen": jnp.zeros((), jnp.int32)}

MEANS = {
    "size": lambda logits, nats, y: js.Mean(nats.sum(), nats.size),
    "ones": lambda logits, nats, y: js.Mean(nats.sum(), jnp.ones(y.shape).sum()),
    "mask": lambda logits, nats, y: js.Mean((nats * (y == 0)).sum(), (y == 0).sum()),
    "terms": lambda logits, nats, y: (
        js.Mean(nats.sum(), nats.size) + 0.1 * js.Mean(jnp.square(logits).mean(), 1) + js.Mean(logits.sum(), len(y))
    ),
}


def init(key):
    return {"w": jnp.ones((5, 3))}


def traces_of(engine, mean, with_state, **axes):
    """The number of times that lowering a step calls its loss."""
    seen = []

    def loss_fn(model, batch, key):
        seen.append(batch["x"].shape)
        params = model.params if with_state else model
        logits = batch["x"] @ params["w"]
        penalty = js.Mean(jnp.square(params["w"]).sum(), 1)
        value = MEANS[mean](logits, js.cross_entropy(logits, batch["y"]), batch["y"]) + 0.1 * penalty
        hits = js.Mean((logits.argmax(-1) == batch["y"]).sum(), len(logits))
        state = {"mean": logits.mean(0), "seen": js.Sum(len(logits))} if with_state else None
        return js.Loss(value, state=state, metrics={"hits": hits})

    model = (lambda key: js.Model(init(key), STATE)) if with_state else init
    mesh = js.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)
    layout = js.layout(js.fsdp(min_size=0), mesh, model, TX)
    seen.clear()
    js.make_step(loss_fn, TX, layout, engine=engine).lower(BATCH)
    return len(seen)


@pytest.mark.parametrize(
    ("engine", "traces"),
    [(js.auto(), 1), (js.auto(microbatches=2), 2), (js.explicit(), 1), (js.explicit(microbatches=2), 2)],
    ids=["auto", "auto 2", "explicit", "explicit 2"],
)
def test_a_loss_is_traced_once_and_for_micro_batches_once_more(engine, traces):
    """For the gradient, and for the weights of all micro-batches if there are several."""
    assert traces_of(engine, "terms", True, data=4) == traces


@pytest.mark.parametrize("mean", ["size", "ones", "mask"])
def test_a_weight_that_counts_the_rows_is_seen_in_that_trace(mean):
    assert traces_of(js.explicit(), mean, False, data=8) == 1


def test_a_state_that_is_made_of_no_rows_is_compared_with_that_of_other_rows():
    """A counter: only another trace tells `n + 1` from `n + x.shape[0]`."""
    seen = []

    def loss_fn(model, batch, key):
        seen.append(batch["x"].shape[0])
        loss = js.Mean(jnp.square(batch["x"] @ model.params["w"]).sum(), len(batch["x"]))
        return js.Loss(loss, state=model.state | {"seen": model.state["seen"] + 1})

    layout = js.layout(js.ddp(), js.make_mesh(data=8), lambda key: js.Model(init(key), STATE), TX)
    js.make_step(loss_fn, TX, layout, engine=js.explicit()).lower(BATCH)
    assert seen == [4, 8]


def test_a_pipeline_traces_its_head_only_for_what_it_computes():
    """For its weights, the parameters that it reads, the zeros of its metrics and its gradient."""
    calls = {"embed": 0, "head": 0}

    def embed(params, batch, key):
        calls["embed"] += 1
        return batch["x"] @ params["embed"]

    def head(params, x, batch, key):
        calls["head"] += 1
        nats = js.cross_entropy(x @ params["head"], batch["y"])
        return js.Mean(nats.sum(), nats.size)

    def start(key):
        return {"embed": jnp.ones((5, 6)), "block": jnp.eye(6), "head": jnp.ones((6, 3))}

    model = js.Stacked(embed, lambda w, x, key: x + jnp.tanh(x @ w), head, 2, start)
    mesh = js.make_mesh(jax.devices()[:4], data=2, pipe=2)
    layout = js.layout(js.compose(js.fsdp(min_size=0), js.pipeline(chunks=1)), mesh, model.init, TX)
    calls |= {"embed": 0, "head": 0}
    js.make_step(model.loss, TX, layout, engine=js.pipelined(microbatches=2)).lower(BATCH)
    assert calls == {"embed": 8, "head": 4}


def test_a_loss_may_have_derivatives_of_its_own_that_read_the_batch():
    """The gradient is traced where the loss runs: what its rules close over is still there."""

    def loss_fn(params, batch, key):
        factor = 2 * batch["x"][:, :3]

        @jax.custom_vjp
        def scaled(x):
            return x * factor

        scaled.defvjp(lambda x: (x * factor, None), lambda _, g: (g * factor,))
        return js.Mean(scaled(batch["x"] @ params["w"]).sum(), len(batch["x"]))

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init, TX)
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit())
    _, metrics = step(js.init(init, TX, layout, 0), BATCH)
    assert metrics["loss"] == 30 and metrics["grad_norm"] == pytest.approx(math.sqrt(15) * 2)
