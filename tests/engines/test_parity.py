"""A sharded run equals the run on one device: f32 losses within 1e-6 relative, gradients within 1e-5 (`tree_error`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxshard as js
from tests.engines.pipeline.pipes import cast_weights, stack_toy
from tests.toys import (
    TOYS,
    Toy,
    Trace,
    assert_equal_runs,
    grad_error,
    loss_error,
    nnx_toy,
    one_device,
    one_device_toy,
    sharded,
    start_of,
    tree_error,
)

pytestmark = pytest.mark.fast_cases(2)

STRATEGIES = {
    "ddp": ({"data": 8}, js.ddp()),
    "zero1": ({"data": 8}, js.zero1(min_size=0)),
    "zero2": ({"data": 8}, js.zero2(min_size=0)),
    "fsdp": ({"data": 8}, js.fsdp(min_size=0)),
    "hsdp": ({"replica": 2, "data": 4}, js.hsdp(min_size=0)),
    "fsdp over two axes": ({"x": 4, "y": 2}, js.fsdp(("x", "y"), min_size=0)),
}
SPLIT = {"ddp": (), "zero1": ("opt",), "zero2": ("opt", "grad")}
ENGINES = {"auto": js.auto, "explicit": js.explicit}
# In the fast tier transformers are in tests/engines/test_tensor.py, Linen models in tests/adapt/test_linen.py, and
# ZeRO-2 trains `two_part_toy`.
FAST = {(s, "explicit", "nnx") for s in STRATEGIES if s != "zero2"} | {("fsdp", "auto", "nnx")}


def mesh_of(name: str) -> jax.sharding.Mesh:
    return js.make_mesh(**STRATEGIES[name][0])


def unless(fast: bool) -> tuple:
    return () if fast else (pytest.mark.slow,)


PRODUCT = [
    pytest.param(strategy, engine, toy, marks=unless((strategy, engine, toy) in FAST))
    for strategy, engine, toy in itertools.product(STRATEGIES, ENGINES, TOYS)
]


@pytest.mark.fast_cases(20)
@pytest.mark.parametrize(("strategy", "engine", "toy"), PRODUCT)
def test_strategy_equals_one_device(strategy, engine, toy):
    trace, layout = sharded(TOYS[toy](), STRATEGIES[strategy][1], mesh_of(strategy), ENGINES[engine]())
    assert_equal_runs(trace, one_device_toy(toy))
    # Everything is split that can be: all but arrays of one element.
    sizes = [p.leaf.size for p in layout.placed() if p.role == "param"]
    splittable = sum(size for size in sizes if size > 1) / sum(sizes)
    for role in ("param", "grad", "opt"):
        wanted = splittable if role in SPLIT.get(strategy, ("param", "grad", "opt")) else 0
        assert layout.sharded_fraction(role) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.fast_cases(1)  # those scattered each time are `two_part_toy`
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "hsdp"])
@pytest.mark.parametrize(("scatter", "engine"), list(itertools.product(("end", "each"), ("explicit", "auto"))))
@pytest.mark.parametrize("toy", ["nnx", "gpt"])
def test_micro_batches_equal_one_device(strategy, scatter, engine, toy):
    engine = ENGINES[engine](microbatches=2, scatter=scatter)
    trace, _ = sharded(TOYS[toy](), STRATEGIES[strategy][1], mesh_of(strategy), engine)
    assert_equal_runs(trace, one_device_toy(toy))


POLICIES = {
    "dots": "dots",
    "nothing": "nothing",
    "a function": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["explicit", "auto"])
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_policies_equal_one_device(policy, engine):
    engine = ENGINES[engine](remat=POLICIES[policy])
    trace, _ = sharded(stack_toy(rows=16), js.fsdp(min_size=0), js.make_mesh(data=8), engine)
    assert_equal_runs(trace, alone(stack_toy, rows=16))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("engine", "count"), [("explicit", 3), ("auto", 1), ("auto", 3), ("explicit", 1)])
def test_other_numbers_of_devices(engine, count):
    toy, mesh = fifteen_rows(), js.make_mesh(jax.devices()[:count], data=count)
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh, ENGINES[engine]())
    assert_equal_runs(trace, alone(fifteen_rows))


def fifteen_rows() -> Toy:
    toy = nnx_toy()
    return toy._replace(batch=jax.tree.map(lambda x: x[:15], toy.batch))


@cache
def alone(make: Callable[..., Toy], *args: Any, **options: Any) -> Trace:
    """A toy on one device, computed once for all cases."""
    return one_device(make(*args, **options))


ROLES = ["param", "grad", "opt"]
UNUSUAL = {
    "an axis that splits no rows": js.compose(js.batch("x"), js.shard("y", ROLES, min_size=0)),
    "no rows split at all": js.shard(("x", "y"), ROLES, min_size=0),
    "every role over other axes": js.compose(
        js.batch("x", "y"),
        js.shard("x", ["param"], min_size=0),
        js.shard("y", ["grad"], min_size=0),
        js.shard(("y", "x"), ["opt"], min_size=0),
    ),
    "two fills": js.compose(js.batch("x"), js.shard("x", ROLES, min_size=0), js.shard("y", ["opt"], min_size=0)),
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:the mesh axis .* splits stored arrays but no rows")
@pytest.mark.parametrize("engine", ["explicit", "auto"])
@pytest.mark.parametrize("strategy", UNUSUAL)
def test_strategies_without_a_name(strategy, engine):
    trace, _ = sharded(nnx_toy(), UNUSUAL[strategy], js.make_mesh(x=4, y=2), ENGINES[engine]())
    assert_equal_runs(trace, one_device_toy("nnx"))


def scalar(toy: Toy) -> Toy:
    return toy._replace(loss_fn=lambda params, batch, key: toy.loss_fn(params, batch, key).value)


def test_an_opaque_scalar_loss_equals_one_device_under_auto():
    trace, _ = sharded(scalar(nnx_toy()), STRATEGIES["hsdp"][1], mesh_of("hsdp"), js.auto())
    assert_equal_runs(trace, one_device_toy("nnx"))


# Losses with several parts, and metrics.


@cache
def two_part_toy() -> Toy:
    """A weighted loss plus an unweighted auxiliary one, and a metric of every kind."""
    toy = nnx_toy()

    def loss_fn(params, batch, key):
        loss = toy.loss_fn(params, batch, key)
        penalty = jnp.square(batch["x"] @ params["first"]["kernel"])
        metrics = {
            "penalty": js.Mean(penalty.sum(), penalty.size),
            "rows": js.Sum((batch["weights"] > 0).sum()),
            "largest": js.Max(penalty.max()),
        }
        return js.Loss(loss + 0.1 * metrics["penalty"], metrics=metrics)

    return toy._replace(loss_fn=loss_fn)


@cache
def two_part_metrics() -> dict[str, Any]:
    """Those of the first step."""
    toy = two_part_toy()
    return jax.jit(lambda params: toy.loss_fn(params, toy.batch, None).metrics)(start_of(toy.init_fn))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ["explicit", "auto"])
@pytest.mark.parametrize("microbatches", [2, 1])
def test_a_sum_of_means_and_its_metrics_equal_one_device(engine, microbatches):
    toy, engine = two_part_toy(), ENGINES[engine](microbatches=microbatches)
    trace, _ = sharded(toy, js.zero2(min_size=0), js.make_mesh(data=8), engine)
    assert_equal_runs(trace, alone(two_part_toy))

    metrics, expected = trace.metrics[0], two_part_metrics()
    assert set(metrics) == {"loss", "grad_norm", "update_norm", "bad", *expected}
    assert float(metrics["penalty"]) == pytest.approx(float(expected["penalty"].value), rel=1e-6)
    assert float(metrics["largest"]) == pytest.approx(float(expected["largest"].value), rel=1e-6)
    assert int(metrics["rows"]) == (toy.batch["weights"] > 0).sum()
    norm = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(trace.grads[0])))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)


# Lower precision.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("toy", ["nnx", "gpt"])
def test_bf16_compute_equals_bf16_on_one_device(engine, toy):
    """The first loss within 1e-6, all within 1e-3; the first gradient's error at most 1.5 times that of one device.

    Sums over 8 shards round otherwise than sums over all rows, so the two gradients are not equal to each other.
    """
    engine = ENGINES[engine](compute_dtype=jnp.bfloat16)
    trace, _ = sharded(TOYS[toy](), js.fsdp(min_size=0), js.make_mesh(data=8), engine)
    control, full = one_device(cast_weights(TOYS[toy]())), one_device_toy(toy)
    assert trace.losses[0] == pytest.approx(control.losses[0], rel=1e-6)
    assert loss_error(trace, control) < 1e-3
    assert tree_error(trace.grads[0], full.grads[0]) <= 1.5 * tree_error(control.grads[0], full.grads[0])
    assert abs(trace.losses[0] - full.losses[0]) > 1e-5
    assert all(x.dtype == np.float32 for x in jax.tree.leaves((trace.params, trace.grads)))


def lowered(engine):
    toy = nnx_toy()
    tx = optax.sgd(0.1)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), toy.init_fn, tx)
    return js.make_step(toy.loss_fn, tx, layout, engine=engine).lower(toy.batch).as_text()


def dtypes_of(text: str, operation: str) -> set[str]:
    """The element types that an operation of a StableHLO module returns."""
    types = set()
    for start in text.split(f"stablehlo.{operation}")[1:]:
        result = start.split("->", 1)[1].split("\n", 1)[0]
        types.add(result.split("tensor<")[1].split(">")[0].split("x")[-1])
    return types


@pytest.mark.parametrize(
    ("options", "gathered", "scattered"),
    [
        ({"compute_dtype": jnp.bfloat16}, "bf16", "f32"),
        ({"reduce_dtype": jnp.bfloat16, "scatter": "end"}, "f32", "bf16"),
        ({"precision": "bf16"}, "bf16", "bf16"),
    ],
)
def test_dtypes_of_gathers_and_scatters(options, gathered, scattered):
    text = lowered(js.explicit(**options))
    assert dtypes_of(text, "all_gather") == {gathered}
    assert dtypes_of(text, "reduce_scatter") == {scattered}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("scatter", ["each", "end"])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_reduced_in_bf16(engine, scatter):
    """Gradients within 2**-7 of f32, and not equal to it."""
    engine = ENGINES[engine](reduce_dtype=jnp.bfloat16, scatter=scatter, microbatches=2)
    trace, _ = sharded(nnx_toy(), js.zero2(min_size=0), js.make_mesh(data=8), engine)
    assert trace.losses[0] == pytest.approx(one_device_toy("nnx").losses[0], rel=1e-6)
    assert 1e-5 < grad_error(trace, one_device_toy("nnx")) < 2**-7


# Frozen parameters.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ["explicit at the end", *ENGINES])
@pytest.mark.parametrize("toy", ["nnx", "linen", "gpt"])
def test_frozen_parameters_stay_and_the_others_equal_one_device(engine, toy):
    toy = TOYS[toy]()
    shapes = jax.eval_shape(toy.init_fn, jax.random.key(0))
    kept = {"Dense_1", "embed", "first"} & shapes.keys()

    def trainable(path: str) -> bool:
        return path.split("/")[0] not in kept

    def frozen(params, batch, key):
        params = {name: jax.lax.stop_gradient(x) if name in kept else x for name, x in params.items()}
        return toy.loss_fn(params, batch, key)

    tx = optax.sgd(toy.rate, momentum=0.9)
    engine = ENGINES[engine]() if engine in ENGINES else js.explicit(microbatches=2, scatter="end")
    trace, layout = sharded(toy, js.fsdp(min_size=0), js.make_mesh(data=8), engine, tx, trainable=trainable)
    reference = one_device(toy._replace(loss_fn=frozen), tx)
    assert loss_error(trace, reference) <= 1e-6
    assert tree_error(trace.params, reference.params) <= 1e-5
    start = start_of(toy.init_fn)
    for name in kept:
        assert jax.tree.all(jax.tree.map(np.array_equal, trace.params[name], start[name]))
        assert not jax.tree.leaves(trace.grads[0][name])
        assert not any(f"/{name}/" in f"/{p.leaf.path}/" for p in layout.placed() if p.role in ("opt", "grad"))


# Random keys.


@cache
def stock_dropout_toy() -> Toy:
    """A stock `nn.Dropout` on identical rows, and as a metric which entries of which row were kept."""
    drop, width = nn.Dropout(0.5, deterministic=False), 40

    def loss_fn(params, batch, key):
        x = drop.apply({}, jnp.ones((len(batch["row"]), width)), rngs={"dropout": key})
        kept = js.Sum(batch["row"].T @ (x > 0).astype(jnp.float32))
        value = jnp.square(x @ params["w"] - 1)
        return js.Loss(js.Mean(value.sum(), value.size), metrics={"kept": kept})

    def init_fn(key):
        return {"w": jax.random.normal(key, (width, 3)) * 0.1}

    return Toy(init_fn, loss_fn, {"row": np.eye(16, dtype=np.float32)})


def test_stock_dropout_does_not_repeat_across_shards_and_micro_batches_under_explicit():
    engine = js.explicit(microbatches=2)
    trace, _ = sharded(stock_dropout_toy(), js.fsdp(min_size=0), js.make_mesh(data=8), engine)
    kept = np.concatenate([metrics["kept"] for metrics in trace.metrics])
    assert len(np.unique(kept, axis=0)) == 5 * 16
    assert 0.45 < kept.mean() < 0.55


# Shapes that nobody chose.


@settings(max_examples=5, deadline=None, derandomize=True)
@example(shapes=[[], [0, 3], [1, 1], [16]], engine="explicit")
@given(
    shapes=st.lists(st.lists(st.integers(1, 19), max_size=3), min_size=1, max_size=4),
    engine=st.sampled_from(sorted(ENGINES)),
)
@pytest.mark.slow
def test_one_step_of_trees_of_any_shapes(shapes, engine):
    """Gradients, known in closed form, within 1e-5; the padding stays zero."""
    rng = np.random.default_rng(3)
    params = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    batch = {"x": rng.normal(size=(16,)).astype(np.float32), "w": np.arange(16, dtype=np.float32)}

    def loss_fn(params, batch, key):
        square = sum(jnp.sum(jnp.square(p)) for p in params)
        return js.Mean((batch["w"] * batch["x"]).sum() * square, batch["w"].sum())

    tx = optax.sgd(0.5, momentum=0.9)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), lambda key: params, tx)
    run = js.init(lambda key: params, tx, layout, 0, init_from=params)
    run, metrics = js.make_step(loss_fn, tx, layout, engine=ENGINES[engine]())(run, batch)
    mean = float((batch["w"] * batch["x"]).sum() / batch["w"].sum())
    expected = [p - 0.5 * 2 * mean * p for p in params]
    assert tree_error(js.logical(run, layout).params, expected) <= 1e-5
    assert float(metrics["loss"]) == pytest.approx(mean * sum((p**2).sum() for p in params), rel=1e-5)
    for stored, placement in zip(run.params, layout.params):
        np.testing.assert_array_equal(placement.view.clear_padding(stored), stored)
