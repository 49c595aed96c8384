"""`js.local`: replicas that train by themselves equal the plain loop on one device: loss to 1e-6, parameters to 1e-5.

`tests/local_reference.py` has the loop. SGD inside, clipped by each replica's own norm; DiLoCo's outer optimizer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checkpoint import manifest
from tests.local_reference import MODEL, NESTEROV, batches, simulate

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)


@cache
def made(inside: Any, mesh: Any, tx: Any, engine: Any, every: int, outer: Any = NESTEROV, warmup: int = 0) -> Any:
    local = js.local("replica", every=every, outer=outer, warmup=warmup)
    strategy = js.compose(inside, local)
    layout = js.layout(strategy, mesh, MODEL.init, tx)
    return layout, js.make_step(MODEL.loss, tx, layout, engine=engine)


def train(layout: Any, step: Any, tx: Any, given: Any) -> tuple[js.TrainState, list[dict[str, Any]]]:
    run, seen = js.init(MODEL.init, tx, layout, jax.random.key(0)), []
    for batch in given:
        run, metrics = step(run, batch)
        seen.append(metrics)
    return run, seen


def worst(a: Any, b: Any) -> float:
    """The largest difference of a leaf, over its largest magnitude."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max() / (np.abs(np.asarray(y)).max() + 1e-3)) for x, y in pairs
    )


@cache
def begun() -> Any:
    """A layout under fsdp, and a run that no step is given."""
    layout, _ = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4)
    return layout, js.init(MODEL.init, CLIPPED, layout, 0)


FSDP, EXPLICIT = js.fsdp("data", min_size=0), js.explicit()
MESH = {"replica": 2, "data": 4}


def compare(inside: Any, axes: dict[str, int], engine: Any, every: int, warmup: int = 0) -> None:
    given = batches(2 * every + 1 + warmup)
    layout, step = made(inside, mesh_of(**axes), CLIPPED, engine, every, warmup=warmup)
    run, seen = train(layout, step, CLIPPED, given)
    shared, own, losses = simulate(CLIPPED, NESTEROV, given, replicas=axes["replica"], every=every, warmup=warmup)
    np.testing.assert_allclose([float(m["loss"]) for m in seen], losses, rtol=1e-6)
    logical = js.logical(run, layout)
    assert worst(logical.params, shared) < 1e-5
    for r, one in enumerate(own):
        assert worst(jax.tree.map(lambda x: x[r], logical.opt_state.params), one) < 1e-5  # noqa: B023


@pytest.mark.slow
def test_a_warm_up_is_that_of_one_device_reduces_gradients_in_a_conditional_and_keeps_replicas_alike() -> None:
    layout, step = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4, warmup=3)
    compiled = step.compile(batches(1)[0])
    assert arrays((compiled, layout.mesh)) == [
        ("all-reduce", ("replica",), ((4, 4), (4, 4, 16), (8, 4), (4,)), True),  # the gradients of one device
        ("all-reduce", ("replica",), ((4, 4), (4, 4, 16), (8, 4), (4,)), True),
    ]
    run, seen = train(layout, step, CLIPPED, batches(3))
    shared, _, losses = simulate(CLIPPED, NESTEROV, batches(3), replicas=2, every=4, warmup=3)
    np.testing.assert_allclose([float(m["loss"]) for m in seen], losses, rtol=1e-6)
    assert worst(js.logical(run, layout).params, shared) < 1e-5
    jax.tree.map(lambda own, one: np.testing.assert_array_equal(own, [one, one]), run.opt_state.params, run.params)
    trace = run.opt_state.inner[1][0].trace["embed"]
    np.testing.assert_array_equal(trace[0], trace[1])
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(run.opt_state.outer))
    assert "every 4 steps; alike in the first 3" in str(layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [js.explicit(), js.auto(), js.explicit(microbatches=2)], ids=["explicit", "auto", "turns"]
)
@pytest.mark.parametrize(
    "inside, axes",
    [
        (js.ddp("data"), MESH),
        (js.zero1("data", min_size=0), MESH),
        (js.zero2("data", min_size=0), MESH),
        (FSDP, {"replica": 4, "data": 2}),
        (js.compose(FSDP, js.tensor([("w", (None, "mlp")), ("embed", (None, None)), *js.RULES])),
         {"replica": 2, "data": 2, "tensor": 2}),
        (js.without_rows(), {"replica": 8}),
    ],
    ids=["ddp", "zero1", "zero2", "fsdp", "tensor", "alone"],
)  # fmt: skip
def test_every_strategy_inside_equals_the_plain_loop_to_1e_6(inside: Any, axes: dict[str, int], engine: Any) -> None:
    if axes["replica"] == 8 and engine.microbatches > 1:
        engine = js.explicit(microbatches=2)  # two rows on each device
    compare(inside, axes, engine, 3)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [js.ddp("data"), js.zero2("data", min_size=0), FSDP], ids=["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize(
    "engine",
    [js.explicit(microbatches=2), js.explicit(scatter="end"), js.auto(), js.auto(microbatches=2)],
    ids=["turns", "end", "auto", "auto turns"],
)
def test_a_warm_up_inside_every_strategy_is_that_of_one_device_to_1e_6(inside: Any, engine: Any) -> None:
    compare(inside, MESH, engine, 2, warmup=3)


@pytest.mark.parametrize("axes", [{"replica": 2, "data": 2}, {"replica": 1}])
def test_a_warm_up_of_a_scalar_loss_is_refused_whatever_it_is_of(axes: dict[str, int]) -> None:
    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        return (MODEL.loss(params, batch, key).totals[0]) ** 2

    inside = js.ddp("data") if "data" in axes else js.without_rows()
    layout = js.layout(js.compose(inside, js.local("replica", every=4, warmup=3)), mesh_of(**axes), MODEL.init, CLIPPED)
    with pytest.raises(TypeError, match=r"local: warmup needs .* js\.Mean\(total, weight\) instead of a scalar"):
        js.make_step(loss_fn, CLIPPED, layout).lower(batches(1)[0])


def arrays(found: Any) -> list[tuple[Any, ...]]:
    """Kind, axes, shapes and whether it is conditional, of what is no scalar and goes over replicas."""
    return [
        (one.kind, one.axes, tuple(shape for shape in one.shapes if shape), one.conditional)
        for one in js.collectives(found[0], found[1])
        if "replica" in one.axes and one.dtype == "f32" and any(one.shapes)
    ]


def test_only_a_conditional_moves_arrays_over_replicas_and_moves_each_once() -> None:
    layout, step = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4)
    compiled = step.compile(batches(1)[0])
    assert arrays((compiled, layout.mesh)) == [
        ("all-reduce", ("replica",), ((4, 4), (4, 4, 16), (8, 4), (4,)), True),
    ]
    assert compiled.as_text().count(" conditional(") == 1


def test_arrays_of_replicas_lie_on_their_own_devices() -> None:
    layout, _ = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4)
    assert layout.opt_state.params["blocks"]["w"].store == P("replica", None, "data", None)
    assert layout.opt_state.inner[1][0].trace["embed"].store == P("replica", None, "data")
    assert layout.opt_state.outer[0][0].trace["blocks"]["w"].store == P(None, "data", None)
    assert layout.opt_state.outer[0][0].trace["blocks"]["w"].view.logical == (4, 16, 16)
    assert layout.params["embed"].store == P(None, "data")
    assert "2 replicas over replica: synchronised every 4 steps" in str(layout)


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_bad_step_of_one_replica_leaves_it_alone_and_in_the_warm_up_all(warmup: int) -> None:
    layout, step = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4, warmup=warmup)
    (batch,) = batches(1)
    spoiled = batch | {"y": np.where(np.arange(16) == 1, np.nan, batch["y"]).astype(np.float32)}
    before = js.init(MODEL.init, CLIPPED, layout, jax.random.key(0))
    kept = js.logical(before, layout)
    after, metrics = step(before, spoiled)
    assert bool(metrics["bad"]) and "head" in metrics["bad"].grads
    now = js.logical(after, layout)
    if warmup:
        jax.tree.map(np.testing.assert_array_equal, (now.params, now.opt_state), (kept.params, kept.opt_state))
        return
    own = now.opt_state.params["head"]
    np.testing.assert_array_equal(own[0], kept.params["head"])
    assert np.isfinite(own).all() and (own[1] != kept.params["head"]).any()
    np.testing.assert_array_equal(now.opt_state.inner[1][0].trace["head"][0], 0)


@pytest.mark.slow
def test_a_saved_run_goes_on_bit_for_bit_and_on_another_mesh_with_as_many_replicas(tmp_path: Any) -> None:
    given = batches(6)
    layout, step = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4)
    run, _ = train(layout, step, CLIPPED, given[:3])
    js.save(tmp_path / "run", run, layout)
    kept = js.restore(tmp_path / "run", layout)
    jax.tree.map(
        np.testing.assert_array_equal, js.logical(run, layout)._replace(key=0), js.logical(kept, layout)._replace(key=0)
    )
    other, _ = made(FSDP, mesh_of(replica=2, data=2), CLIPPED, EXPLICIT, 4)
    moved = js.restore(tmp_path / "run", other)
    jax.tree.map(
        np.testing.assert_array_equal, js.logical(run, layout)._replace(key=0), js.logical(moved, other)._replace(key=0)
    )
    four, _ = made(FSDP, mesh_of(replica=4, data=2), CLIPPED, EXPLICIT, 4)
    with pytest.raises(ValueError, match=r"opt_state/params/embed.*\[4, 8, 16\]"):
        js.restore(tmp_path / "run", four)
    start = js.init(MODEL.init, CLIPPED, four, 0, init_from=js.logical(run, layout).params)
    np.testing.assert_array_equal(start.opt_state.params["head"][3], js.logical(run, layout).params["head"])


def test_a_checkpoint_whose_outer_state_was_in_several_parts_is_refused_by_name(tmp_path: Any) -> None:
    """As earlier versions wrote it, where replicas were synchronised in fragments."""
    layout, run = begun()
    step = js.save(tmp_path, run, layout)
    saved = manifest.read_manifest(step)
    parts = [one for one in saved.arrays if one.path.startswith("opt_state/outer/0")]
    second = tuple(one._replace(path=one.path.replace("outer/0", "outer/1")) for one in parts)
    manifest.write_manifest(step / manifest.MANIFEST, saved._replace(arrays=(*saved.arrays, *second)))
    with pytest.raises(ValueError, match=r"(?s)without an optimizer.*opt_state/outer/1/0/trace/embed"):
        js.restore(tmp_path, layout)
    manifest.write_manifest(step / manifest.MANIFEST, saved)
    without = js.layout(js.fsdp("data", min_size=0), mesh_of(data=8), MODEL.init)
    assert js.restore(tmp_path, without).params["embed"].shape == (8, 16)  # the way out


@pytest.mark.slow
def test_evaluation_sees_the_shared_parameters_and_all_rows() -> None:
    given = batches(3)
    layout, step = made(FSDP, mesh_of(**MESH), CLIPPED, EXPLICIT, 4)
    run, _ = train(layout, step, CLIPPED, given)
    evaluate = js.make_eval_step(lambda model, batch: {"loss": MODEL.loss(model, batch, None)}, layout)
    params = js.logical(run, layout).params
    mean = MODEL.loss(params, given[0], None)
    mean = mean.value if isinstance(mean, js.Loss) else mean
    found = js.evaluate(evaluate, run, [given[0]])["loss"]
    np.testing.assert_allclose(found, mean.totals[0] / mean.weights[0], rtol=1e-5)


def test_what_is_not_supported_is_refused_by_name() -> None:
    mesh = mesh_of(**MESH)
    local = js.local("replica", every=4)

    def refuse(match: str, strategy: Any, init: Any = MODEL.init, mesh: Any = mesh) -> None:
        with pytest.raises(ValueError, match=match):
            js.layout(strategy, mesh, init, CLIPPED)

    refuse("local: js.pipeline is not supported", js.compose(js.pipeline("data", chunks=1), local))
    refuse("axis 'replica' already splits the rows", js.compose(js.hsdp("replica", "data"), local))
    refuse("nothing else may split arrays over 'replica'", js.compose(js.shard("replica", "opt", min_size=0), local))
    refuse("the mesh .* has no axis 'pod'", js.compose(js.ddp(), js.local("pod", every=4)))
    refuse("one js.local", js.compose(local, js.local("data", every=2)))
    refuse(
        "state besides its parameters", js.compose(js.ddp(), local), lambda key: js.Model(MODEL.init(key), jnp.ones(3))
    )
    layout, run = begun()
    with pytest.raises(ValueError, match=r"reduction='ordered' is not supported under js\.local"):
        js.make_step(MODEL.loss, CLIPPED, layout, engine=js.explicit(reduction="ordered"))
    with pytest.raises(ValueError, match="holds what was made from the old parameters"):
        js.replace_params(run, jax.device_get(run.params), CLIPPED, layout, opt_state="keep")


def test_what_knows_no_replicas_says_so() -> None:
    mesh = mesh_of(**MESH)
    strategy = js.compose(js.ddp(), js.local("replica", every=4))
    (batch,) = batches(1)
    with pytest.raises(ValueError, match="parity: replicas that train by themselves"):
        js.parity(MODEL.init, MODEL.loss, CLIPPED, strategy, mesh, batch)
    layout, run = begun()
    with pytest.raises(ValueError, match="predict: replicas that train by themselves"):
        js.plan.predict(layout, MODEL.loss, batch, tx=CLIPPED)
    with pytest.raises(ValueError, match="value_and_grad: replicas that train by themselves"):
        js.value_and_grad(MODEL.loss, layout)
    with pytest.raises(ValueError, match=r"averaged: .* evaluate the run itself"):
        js.averaged(run, layout)
    with pytest.raises(ValueError, match=r"js\.Rollback.* replicas of js\.local .* use bad_steps='skip'"):
        js.fit(run, lambda run, batch: (run, {}), [batch], steps=1, bad_steps=js.Rollback(lambda: (run, 0)))


def test_matrices_inside_a_replica_have_no_owners() -> None:
    strategy = js.compose(FSDP, js.local("replica", every=4))
    layout = js.layout(strategy, mesh_of(**MESH), MODEL.init, optax.contrib.muon(0.1))
    assert layout.owners is None
    assert js.make_step(MODEL.loss, optax.contrib.muon(0.1), layout).update_view.startswith("in each replica, ")
