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
def test_over_a_tensor_axis_the_outputs_of_experts_are_summed_at_once():
    """By one all-reduce, not by halves that go from device to device."""
    axes, strategy = MESHES["tensor alone"]
    toy = moe_toy("softmax")
    layout = js.layout(strategy, js.make_mesh(**axes), toy.init_fn, optax.sgd(0.1))
    comparison = js.audit(js.make_step(toy.loss_fn, optax.sgd(0.1), layout, engine=js.explicit()), toy.batch)
    assert comparison.ok and not comparison.missing, str(comparison)
    assert {row["kind"] for row in comparison.rows() if row["axis"] == "tensor"} == {"all-reduce"}


@pytest.mark.slow
def test_the_audit_finds_what_is_promised_and_nothing_else():
    """Over `expert` all-to-alls, a gather of counts, and what fsdp moves of arrays that are no expert's."""
    axes, strategy = MESHES["expert=4"]
    toy = moe_toy("softmax")
    layout = js.layout(strategy, js.make_mesh(**axes), toy.init_fn, optax.sgd(0.1))
    report = js.audit(js.make_step(toy.loss_fn, optax.sgd(0.1), layout, engine=js.explicit()), toy.batch)
    assert report.ok and not report.missing, str(report)
    rows = {(row["kind"], row["axis"]): (row["promised"], row["bytes"]) for row in report.rows()}
    assert rows["all-to-all", "expert"][0] is None
    exact = {key: sizes for key, sizes in rows.items() if key not in ALSO_FOUND}
    assert all(promised == found for promised, found in exact.values()), rows
    # No array of experts over their axis: 3 of [8, 32, 24] in two blocks, gathered over data alone, by the quarter.
    experts = [one for one in report.promised if "/experts/" in one.what]
    assert {one.axes for one in experts} == {("data",)}
    assert {one.elements for one in experts} == {(2 * 32 * 24, 2 * 32 * 24)}


ALSO_FOUND = {("all-to-all", "expert"), ("all-gather", "expert")}


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


@pytest.mark.slow
def test_a_checkpoint_of_spread_experts_is_restored_on_any_mesh(tmp_path):
    model, tx = js.models.moe(**SIZES), optax.sgd(0.1, momentum=0.9)
    axes, strategy = MESHES["expert=4"]
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    run = js.init(model.init, tx, layout, 0)
    js.save(tmp_path, run, layout)
    saved = jax.device_get(js.logical(run, layout).params)
    others = [
        ({"data": 8}, js.fsdp(min_size=0)),
        MESHES["expert=2"],
        ({"pipe": 2, "expert": 4}, js.compose(js.expert(), js.pipeline(chunks=1))),
    ]
    for axes, strategy in others:
        other = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
        restored = js.logical(js.restore(tmp_path, other), other).params
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), saved)
