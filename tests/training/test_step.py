"""The training step as users meet it: what it returns, what it takes away, and what it refuses by name."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import normal

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1, momentum=0.9)


def init_fn(key):
    return {"w": normal(0, 13, 3), "b": jnp.zeros((3,))}


def loss_fn(params, batch, key):
    error = jnp.square(batch["x"] @ params["w"] + params["b"])
    return js.Mean(error.sum(), error.size)


def batch_of(rows=16, features=13):
    return {"x": np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)}


def layout_of(strategy=None, tx=TX, init_fn=init_fn, mesh=None):
    return js.layout(strategy or js.zero2(min_size=0), mesh or js.make_mesh(data=8), init_fn, tx)


@cache
def usual():
    layout = layout_of()
    return layout, js.init(init_fn, TX, layout, 0)


def start(layout=None, loss_fn=loss_fn, tx=TX, init=init_fn, **options):
    """The first run and a step; of the usual layout a copy of a run that was made once."""
    if layout is None and (tx, init) == (TX, init_fn):
        layout, run = usual()
        run = js.clone(run)
    else:
        layout = layout or layout_of(tx=tx, init_fn=init)
        run = js.init(init, tx, layout, 0)
    return run, js.make_step(loss_fn, tx, layout, **options)


# What a step does.


def test_a_step_counts_and_returns_global_scalars():
    run, step = start()
    for number in range(3):
        assert int(run.step) == number
        run, metrics = step(run, batch_of())
    assert set(metrics) == {"loss", "grad_norm", "update_norm", "bad"}
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(metrics))
    assert metrics["loss"].shape == metrics["grad_norm"].shape == () and not metrics["bad"]
    assert jax.tree.map(lambda x: x.sharding, run) == jax.tree.map(lambda x: x.sharding, start()[0])
    step(run, batch_of())
    assert all(x.is_deleted() for x in jax.tree.leaves((run.params, run.opt_state)))


def test_a_step_is_lowered_and_compiled_without_a_run():
    _, step = start()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of())
    assert "all_reduce" in js.make_step(loss_fn, TX, layout_of(), engine=js.explicit()).lower(shapes).as_text()
    compiled = step.compile(shapes)
    assert compiled is step.compile(batch_of())
    # On the CPU the compiler counts pages of pointers as well: the layout's figure is compared to the byte elsewhere.
    assert compiled.memory_analysis().argument_size_in_bytes >= step.layout.argument_bytes(shapes)


@pytest.mark.filterwarnings("ignore:the batch is narrowed")
def test_batches_may_lie_anywhere_and_a_step_that_does_not_donate_can_be_taken_again():
    layout = layout_of()
    places = [lambda x: x, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[5]), lambda x: x.astype(np.float64)]
    places.append(lambda x: jax.device_put(x, layout.batch_sharding(x)))
    run, step = start(layout, donate=False)
    assert len({float(step(run, jax.tree.map(place, batch_of()))[1]["loss"]) for place in places}) == 1
    assert step.compile(batch_of()).memory_analysis().alias_size_in_bytes == 0


def test_scalars_in_a_batch_are_the_same_for_every_row_and_micro_batch():
    def scaled(params, batch, key):
        return batch["scale"] * loss_fn(params, batch, key)

    run, step = start(loss_fn=scaled, engine=js.explicit(microbatches=2))
    expected = 3 * float(jax.jit(lambda: loss_fn(init_fn(None), batch_of(), None).value)())
    assert float(step(run, batch_of() | {"scale": np.float32(3)})[1]["loss"]) == pytest.approx(expected, rel=1e-6)


def test_on_which_view_the_optimizer_runs():
    _, step = start()
    assert step.update_view == "stored view: the optimizer is elementwise and moves nothing"
    tx = optax.lamb(1e-3)
    _, step = start(tx=tx)
    # w and b, padded to 16 x 3 and 8 over 8 devices: 6 and 1 numbers of f32, for each of two moments.
    assert "logical view: the optimizer is not elementwise" in step.update_view
    assert "4 padded arrays of its state, 56 bytes per device" in step.update_view


# Losses.


@pytest.mark.parametrize(
    ("engine", "output", "message"),
    [
        (js.explicit(), lambda e: (e.sum(), {}), r"got tuple; return js.Loss\(value, state=..., metrics=...\)"),
        (js.explicit(), lambda e: e.sum(), r"js.explicit needs a loss that says its weight; .* runs under js.auto"),
        (js.auto(microbatches=2), lambda e: e.sum(), "2 micro-batches need a loss that says its weight: return js.M"),
    ],
    ids=["tuple", "scalar", "scalar in micro-batches"],
)
def test_losses_that_are_none(engine, output, message):
    """`tests/core/test_loss.py` has the other outputs that are no losses."""
    step = js.make_step(lambda p, batch, key: output(batch["x"] @ p["w"]), TX, layout_of(), engine=engine)
    with pytest.raises(TypeError, match=message):
        step.lower(batch_of())


def test_a_loss_that_returns_another_state():
    def with_state(key):
        return js.Model(init_fn(key), {"mean": jnp.zeros(3), "count": jnp.zeros((), jnp.int32)})

    def other_state(model, batch, key):
        return js.Loss(loss_fn(model.params, batch, key), state={"mean": jnp.zeros(4)})

    step = js.make_step(other_state, TX, layout_of(init_fn=with_state), engine=js.explicit(microbatches=2))
    message = r"(?s)the loss returned another state.*count: missing.*mean: expected float32\[3\], got float32\[4\]"
    with pytest.raises(ValueError, match=message):
        step.lower(batch_of())


# Batches.


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of(12), "x has 12 rows, which the 8 devices of axis 'data' do not divide; use a multiple of 8.*as 16"),
        (batch_of(0), "a batch of 0 rows"),
        ({"x": np.float32(1)}, "the batch has no array with rows"),
    ],
    ids=["indivisible", "no rows", "scalar"],
)
def test_batches_that_do_not_divide(batch, message):
    with pytest.raises(ValueError, match=message):
        js.make_step(loss_fn, TX, layout_of()).lower(batch)


def test_a_batch_of_which_the_strategy_says_that_no_array_has_rows():
    """The error names js.shard, which trains it: `test_strategies_without_a_name` has it."""
    mesh, tx, batch = js.make_mesh(data=8), optax.sgd(0.1), batch_of(12) | {"unused": np.ones(5, np.float32)}
    with pytest.raises(ValueError, match=r"js.without_rows names all of its arrays; .* js.shard\(axis, roles\)"):
        js.parity(init_fn, loss_fn, tx, js.compose(js.fsdp(), js.without_rows("*")), mesh, batch)


def test_micro_batches_that_do_not_divide():
    message = (
        "a batch of 16 rows does not divide into 4 micro-batches over 8 devices; use a multiple of 32 rows, such as 32"
    )
    with pytest.raises(ValueError, match=message):
        js.make_step(loss_fn, TX, layout_of(), engine=js.explicit(microbatches=4)).lower(batch_of())


def test_a_batch_of_another_shape_than_the_first():
    run, step = start()
    with pytest.raises(TypeError, match="contracting dimensions"):  # which does not count as the first
        step(run, batch_of(16, 12))
    run, _ = step(run, batch_of())
    message = (
        r"(?s)the batch has other shapes or dtypes than the first.*x: expected float32\[16, 13\], got float32\[8, 13\]"
    )
    with pytest.raises(ValueError, match=message):
        step(run, batch_of(8))
    with pytest.raises(ValueError, match=r"(?s)other shapes or dtypes.*y: unexpected, float32\[16\]"):
        step(run, batch_of() | {"y": np.zeros(16, np.float32)})
    run, _ = step(run, batch_of())  # and the run is still there
    assert int(run.step) == 2


# Runs, optimizers and engines.


def test_a_run_of_another_model():
    def other(key):
        return init_fn(key) | {"b": jnp.zeros((4,)), "extra": jnp.zeros(2)}

    strange, _ = start(init=other)
    run, step = start()
    message = r"(?s)the run does not fit the layout; make it with js.init.*params/extra: unexpected, float32\[2\]"
    with pytest.raises(ValueError, match=message):
        step(strange, batch_of())
    step(run, batch_of())
    with pytest.raises(ValueError, match=message):  # also after the step was compiled
        step(strange, batch_of())


def test_a_run_of_another_layout():
    def even(key):
        return {"w": normal(0, 16, 8)}

    def even_loss(params, batch, key):
        return js.Mean((batch["x"] @ params["w"]).sum(), 1.0)

    split, _ = start(layout_of(js.fsdp(min_size=0), init_fn=even), init=even)
    run, step = start(layout_of(js.ddp(), init_fn=even), even_loss, init=even)
    message = r"(?s)arrays of the run have other shardings than the layout; make it with js.init.*params/w: .*data"
    with pytest.raises(ValueError, match=message):
        step(split, batch_of(16, 16))
    step(run, batch_of(16, 16))
    with pytest.raises(ValueError, match=message):
        step(split, batch_of(16, 16))


def test_no_optimizer_no_engine_no_loss():
    with pytest.raises(TypeError, match=r"tx must be an optax GradientTransformation such as optax.adam"):
        js.make_step(loss_fn, None, layout_of())
    with pytest.raises(TypeError, match=r"tx must be an optax GradientTransformation such as optax.adam"):
        js.init(init_fn, optax.sgd, layout_of(), 0)
    with pytest.raises(
        TypeError, match=r"engine must be js.auto\(...\), js.explicit\(...\) or js.pipelined\(...\), got str"
    ):
        js.make_step(loss_fn, TX, layout_of(), engine="explicit")
    with pytest.raises(TypeError, match=r"loss_fn must be a function loss_fn\(model, batch, key\), got NoneType"):
        js.make_step(None, TX, layout_of())


@pytest.mark.parametrize("engine", [js.auto, js.explicit])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"microbatches": 0}, ValueError, "microbatches must be a whole number from 1 on, got 0"),
        ({"microbatches": 2.0}, ValueError, "microbatches must be a whole number from 1 on, got 2.0"),
        ({"scatter": "last"}, ValueError, "scatter must be 'each' or 'end', got 'last'"),
        (
            {"remat": "some"},
            ValueError,
            "remat must be one of 'nothing', 'dots', 'everything', a function.*got 'some'",
        ),
        ({"compute_dtype": "bf8"}, TypeError, "compute_dtype must be a floating dtype such as jnp.bfloat16, got 'bf8'"),
        (
            {"reduce_dtype": jnp.int8},
            TypeError,
            "reduce_dtype must be a floating dtype such as jnp.bfloat16, or a js.wire.Format .*, got .*int8",
        ),
    ],
)
def test_engines_that_cannot_be(engine, options, error, message):
    with pytest.raises(error, match=message):
        engine(**options)
