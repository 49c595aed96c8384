"""Mistakes that are easily made with a run, a layout or a batch: refused by name, or harmless."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard as js
from tests.toys import normal

TX = optax.sgd(0.1)
BATCH = {"x": np.linspace(-1, 1, 16 * 7, dtype=np.float32).reshape(16, 7), "scale": 2.0}


def init_fn(key):
    return {"w": normal(0, 7)}


def loss_fn(params, batch, key):
    return js.Mean((batch["scale"] * (batch["x"] @ params["w"]) ** 2).sum(), batch["x"].shape[0])


@cache
def first(strategy):
    layout = js.layout(strategy, js.make_mesh(data=8), init_fn, TX)
    return layout, js.init(init_fn, TX, layout, 0)


def made(strategy):
    layout, run = first(strategy)
    return layout, js.clone(run)


def test_init_from_casts_nothing():
    layout, _ = made(js.fsdp())
    with pytest.raises(ValueError, match=r"(?s)other dtypes.*w: float64, expected float32"):
        js.init(init_fn, TX, layout, 0, init_from={"w": np.zeros(7)})


def test_a_loss_that_names_an_axis_it_does_not_run_over():
    """A module made for pmap, such as BatchNorm(axis_name="batch")."""
    layout, run = made(js.fsdp(min_size=0))

    def pmapped(params, batch, key):
        return js.Mean(jax.lax.pmean((batch["x"] @ params["w"]).sum(), "batch"), batch["x"].shape[0])

    explained = r"the (loss|function) names an axis .*batch.* without axis_name.* of the batch: 'data'"
    for engine in (js.auto(), js.explicit()):
        with pytest.raises(ValueError, match=explained):
            js.make_step(pmapped, TX, layout, engine=engine)(run, BATCH)
        with pytest.raises(ValueError, match=explained):
            js.parity(init_fn, pmapped, TX, js.fsdp(), layout.mesh, BATCH, engine=engine)
    with pytest.raises(ValueError, match=explained):
        js.make_apply(lambda params, batch: pmapped(params, batch, None), layout)(run, BATCH)


def test_a_loss_that_places_arrays_by_itself():
    """A model made for axes of type Explicit, such as one with out_sharding=P("data", None)."""
    layout, run = made(js.fsdp(min_size=0))

    def placing(params, batch, key):
        out = jnp.einsum("bd,d->b", batch["x"], params["w"], out_sharding=jax.P("data"))
        return js.Mean(out.sum(), out.size)

    explained = r"(?s)places arrays by itself.*PartitionSpec.*to no sharding: js.layout .* js.constrain\(x, names\)"
    for engine in (js.auto(), js.explicit()):
        with pytest.raises(ValueError, match=explained):
            js.make_step(placing, TX, layout, engine=engine)(run, BATCH)
        with pytest.raises(ValueError, match=explained):
            js.parity(init_fn, placing, TX, js.fsdp(), layout.mesh, BATCH, engine=engine)


def test_what_is_no_run():
    layout, run = made(js.ddp())
    step = js.make_step(loss_fn, TX, layout)
    with pytest.raises(TypeError, match=r"swapped; write step\(run, batch\)"):
        step(BATCH, run)
    pair = step(run, BATCH)
    takers = (lambda x: step(x, BATCH), lambda x: js.logical(x, layout), lambda x: js.fit(x, step, [BATCH], steps=2))
    for take in takers:
        with pytest.raises(TypeError, match=r"pair that a step returned; take it apart: run, metrics = step\(run, b"):
            take(pair)
        with pytest.raises(TypeError, match=r"run must be a js.TrainState.*, got dict"):
            take(BATCH)


def test_a_model_prints_in_one_line():
    model = js.linen(nn.Dense(1), lambda model, batch: 0.0, {"x": BATCH["x"]})
    assert [repr(fn) for fn in (model, model.init, model.loss, model.evaluate)] == [
        "js.linen(Dense)", "js.linen(Dense).init", "js.linen(Dense).loss", "js.linen(Dense).evaluate",
    ]  # fmt: skip
    assert repr(js.nnx(init_fn, lambda model, batch: 0.0).loss) == "js.nnx(init_fn).loss"


@pytest.mark.parametrize(
    ("name", "end"),
    [("fsdpp", "; did you mean js.fsdp?"), ("zero3", "; did you mean js.fsdp?"), ("qqq", ""), ("_qqq", "")],
)
def test_a_name_that_is_not_there(name, end):
    with pytest.raises(AttributeError) as caught:
        getattr(js, name)
    assert str(caught.value) == f"module 'jaxshard' has no attribute '{name}'{end}"
