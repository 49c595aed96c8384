"""Decoders with routed experts: their numbers, and the same run on every mesh (losses 1e-6, gradients 1e-5)."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import Toy, assert_equal_runs, mask, one_device, sharded

SIZES = {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "experts": 8, "k": 2, "seq": 8}
ROWS = 16
KINDS = {
    "softmax": {"z": 0.01},
    "sigmoid": {"scores": "sigmoid", "shared": 1, "bias_rate": 0.01, "depth": 3, "dense": 1, "qk_norm": True},
    "not normalized": {"normalize": False, "k": 3, "balance": 0.0},
}


@cache
def moe_toy(kind: str) -> Toy:
    model = js.models.moe(**SIZES | KINDS[kind])
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, 9), dtype=np.int32)
    return Toy(model.init, model.loss, {"tokens": tokens, "weights": mask((ROWS, 8))})


@cache
def reference(kind: str):
    return one_device(moe_toy(kind), steps=2)


fsdp = js.fsdp(("data", "expert"), min_size=0)
MESHES = {
    "expert=2": ({"data": 4, "expert": 2}, js.compose(fsdp, js.expert())),
    "expert=4": ({"data": 2, "expert": 4}, js.compose(fsdp, js.expert())),
    "expert=8": ({"data": 1, "expert": 8}, js.compose(fsdp, js.expert())),
    "shared": ({"data": 8}, js.compose(js.fsdp(min_size=0), js.expert("data"))),
    "tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(fsdp, js.expert(), js.tensor())),
    "tensor=4": ({"expert": 2, "tensor": 4}, js.compose(js.expert(), js.tensor())),
    "tensor alone": ({"data": 4, "tensor": 2}, js.compose(js.ddp(), js.tensor())),
}
ENGINES = {"explicit": js.explicit(microbatches=2), "auto": js.auto()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "engine", "kind"),
    [(m, e, k) for m in MESHES for e in ENGINES for k in KINDS],
)
def test_a_mesh_equals_one_device(mesh, engine, kind):
    axes, strategy = MESHES[mesh]
    trace, _ = sharded(moe_toy(kind), strategy, js.make_mesh(**axes), ENGINES[engine], steps=2)
    assert_equal_runs(trace, reference(kind))


@pytest.mark.slow
def test_biases_move_by_the_sign_of_how_much_more_an_expert_was_chosen():
    model = js.models.moe(**SIZES | {"depth": 1, "balance": 0.0, "bias_rate": 0.25})
    params, batch = jax.jit(model.init)(jax.random.key(0)), moe_toy("softmax").batch
    load = jax.jit(model.routing.evaluate)(params, batch)["load"].value
    tx = model.optimizer(optax.sgd(1.0))
    grads = jax.jit(jax.grad(lambda params: model.loss(params, batch, jax.random.key(0)).value.value))(params)
    bias = grads["blocks"]["router"]["bias"]
    np.testing.assert_allclose(bias, load / load.sum() - 1 / 8, atol=1e-6)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["blocks"]["router"]["bias"], -0.25 * np.sign(bias))
    np.testing.assert_array_equal(updates["blocks"]["router"]["kernel"], -grads["blocks"]["router"]["kernel"])
    assert js.models.moe(**SIZES).optimizer(tx) is tx


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 9}, "every token takes k=9 experts, but there are 8"),
        ({"experts": 0}, "sizes must be at least 1"),
        ({"dense": 2}, "dense=2 blocks of depth=2 leave none with experts"),
        ({"balance": -1.0}, "factors must not be negative, got {'balance': -1.0}"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        js.models.moe(**SIZES | changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_a_pipeline_equals_one_device(kind, schedule):
    mesh = js.make_mesh(pipe=2, data=2, expert=2)
    engine = js.pipelined(microbatches=2, schedule=schedule)
    strategy = js.compose(fsdp, js.expert(), js.pipeline(chunks=1))
    trace, _ = sharded(moe_toy(kind), strategy, mesh, engine, steps=2)
    assert_equal_runs(trace, reference(kind))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.pipelined(microbatches=2)])
def test_evaluation_counts_loads_and_takes_short_batches(engine):
    """Loads of the experts add up to every choice, and a batch that devices do not divide is evaluated as it is."""
    piped = engine.name == "pipelined"
    parts = [fsdp, js.expert(), *([js.pipeline(chunks=1)] if piped else [])]
    mesh = js.make_mesh(**({"pipe": 2} if piped else {}), data=2, expert=2 if piped else 4)
    model = js.models.moe(**SIZES, capacity=1.0)
    layout = js.layout(js.compose(*parts), mesh, model.init, optax.sgd(0.1))
    run = js.init(model.init, optax.sgd(0.1), layout, 0)
    params = js.logical(run, layout).params
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS + 5, 9), dtype=np.int32)
    batches = [{"tokens": tokens[:ROWS]}, {"tokens": tokens[ROWS:]}]
    for fn in (model.evaluate, model.routing.evaluate):
        step = js.make_eval_step(fn, layout, engine=engine)
        for batch in batches:
            found, expected = step(run, batch), fn(params, batch)
            for name, metric in expected.items():
                np.testing.assert_allclose(found[name].value, metric.value, rtol=1e-5, atol=1e-6)
            if fn == model.routing.evaluate:
                assert np.asarray(found["load"].value).sum() == len(batch["tokens"]) * 8 * 2 * 2
            else:
                assert 0 < found["drop_rate"].value < 1
