"""Runs are born sharded, bit for bit as on one device, and come back in model order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.layout import human_bytes
from jaxshard.models.gpt import gpt
from tests.notebook_page import read
from tests.toys import TOYS, model_order, one_device_key

pytestmark = [pytest.mark.fast_cases(1), pytest.mark.usefixtures("compiled_quickly")]

MESH = {"data": 8}


def assert_bits(tree, reference):
    assert jax.tree.structure(tree) == jax.tree.structure(reference)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def small_init(key):
    a, b = jax.random.split(key)
    params = {"w": jax.random.normal(a, (13, 9)), "b": jax.random.uniform(b, (9,)), "scale": jnp.float32(2)}
    return js.Model(params, {"mean": jnp.arange(9.0), "count": jnp.int32(3)})


TX = optax.adam(1e-3)


def small(strategy=None, mesh=None):
    strategy = strategy or js.compose(js.fsdp(min_size=0), js.shard("data", ["state"], min_size=0))
    return js.layout(strategy, mesh or js.make_mesh(**MESH), small_init, TX)


# Birth.


@pytest.mark.parametrize(
    ("toy", "strategy"),
    [("linen", js.fsdp(min_size=0)), ("gpt", js.fsdp(min_size=0)), ("nnx", js.zero1(min_size=0))],
    ids=["linen", "gpt", "nnx"],
)
def test_parameters_are_bit_for_bit_those_of_one_device(toy, strategy):
    toy = TOYS[toy]()
    layout = js.layout(strategy, js.make_mesh(**MESH), toy.init_fn, TX)
    run = js.init(toy.init_fn, TX, layout, 7)
    params = jax.jit(toy.init_fn)(jax.random.key(7))
    assert_bits(model_order(layout.params, run.params), params)
    assert_bits(model_order(layout.opt_state, run.opt_state), TX.init(params))
    shown = js.logical(run, layout)
    assert_bits((shown.params, shown.opt_state), (params, TX.init(params)))
    assert int(run.step) == 0
    assert_bits(jax.random.key_data(run.key), jax.random.key_data(jax.random.fold_in(jax.random.key(7), 1)))


def test_every_device_holds_its_shard_alone():
    layout = small()
    run = js.init(small_init, TX, layout, 0)
    for tree, placements in ((run.params, layout.params), (run.opt_state, layout.opt_state), (run.state, layout.state)):
        for x, placement in zip(jax.tree.leaves(tree), jax.tree.leaves(placements), strict=True):
            assert {shard.data.shape for shard in x.addressable_shards} == {placement.shard_shape(layout.mesh)}
            assert len(x.addressable_shards) == 8
    assert run.params["w"].addressable_shards[0].data.shape == (2, 9)  # 13 rows padded to 16


def test_a_notebook_shows_a_run_without_its_values():
    layout = small()
    run = js.init(small_init, TX, layout, 0)
    page = read(run)
    assert page.text[0] == "TrainState at step 0"
    held = {row[0]: row[-1] for row in page.tables[0][1:]}
    sizes = layout.bytes_per_device()
    assert held["params"] == human_bytes(sizes["param"]) and held["opt_state"] == human_bytes(sizes["opt"])
    assert ["params", "w", "[16, 9]", "float32", "('data', None)"] in page.tables[1]
    assert read(jax.eval_shape(lambda: run)).text[0] == "TrainState of shapes"
    jax.tree.map(lambda x: x.delete(), run)
    assert read(run).text[0] == "TrainState that was donated to a step"


def wide_init(key):
    """Twelve weights of 6.7 MB, drawn apart."""
    return {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (1296, 1296)) for i in range(12)}


@pytest.mark.parametrize("model", ["stacked", "separate"])
def test_80_megabytes_are_born_with_temporaries_of_at_most_two_shards(model):
    """f32 parameters over 8 devices, SGD with momentum: outputs to the byte, temporaries 2.1 shards of the parameters.

    Random bits and the numbers made of them are both there at once, which is where the 2 comes from.
    """
    init_fn = gpt(vocab=256, width=512, depth=6, heads=8, seq=64).init if model == "stacked" else wide_init
    tx = optax.sgd(0.1, momentum=0.9)
    layout = js.layout(js.fsdp(), js.make_mesh(**MESH), init_fn, tx)
    whole = sum(x.size * 4 for x in jax.tree.leaves(layout.shapes.params))
    shard = layout.bytes_per_device()["param"]
    assert whole > 75e6 and shard < 1.02 * whole / 8
    program = jax.jit(lambda key: js.init(init_fn, tx, layout, key))
    memory = program.lower(jax.random.key(0)).compile().memory_analysis()
    held = sum(layout.bytes_per_device()[role] for role in ("param", "opt"))
    pointers = 8 * (2 + len(jax.tree.leaves((layout.params, layout.opt_state))))
    assert held <= memory.output_size_in_bytes <= held + 4 + 8 + pointers
    assert memory.temp_size_in_bytes <= 2.1 * shard


# Given parameters.


def given(key=5):
    return jax.device_get(small_init(jax.random.key(key)))


SOURCES = {
    "python scalars": lambda model: model._replace(params=model.params | {"scale": float(model.params["scale"])}),
    "numpy": lambda model: model,
    "jax": lambda model: jax.tree.map(jnp.asarray, model),
    "one device": lambda model: jax.device_put(model, jax.devices()[3]),
    "some devices": lambda model: jax.device_put(
        model, jax.NamedSharding(js.make_mesh(jax.devices()[:4], data=4), jax.P())
    ),
    "all devices": lambda model: jax.device_put(model, jax.NamedSharding(js.make_mesh(**MESH), jax.P())),
}


@pytest.mark.parametrize("source", SOURCES)
def test_given_parameters_are_copied_as_they_are(source):
    layout, model = small(), SOURCES[source](given())
    run = js.init(small_init, TX, layout, 0, init_from=model)
    assert_bits(model_order(layout.params, run.params), given().params)
    assert_bits(model_order(layout.state, run.state), given().state)
    assert_bits(model_order(layout.opt_state, run.opt_state), TX.init(given().params))
    assert_bits(jax.random.key_data(run.key), jax.random.key_data(one_device_key()))


@pytest.mark.parametrize("source", ["all devices", "numpy", "jax", "one device"])
def test_given_parameters_outlive_the_donated_run(source):
    layout, model = small(js.ddp()), SOURCES[source](given())
    run = js.init(small_init, TX, layout, 0, init_from=model)
    step = js.make_step(loss_fn, TX, layout)
    for _ in range(2):
        run, _ = step(run, np.ones((8, 13), np.float32))
    assert_bits(jax.device_get(model), given())


def loss_fn(model, x, key):
    out = x @ model.params["w"] * model.params["scale"] + model.params["b"]
    return js.Loss(js.Mean(jnp.square(out).sum(), out.size), state=model.state)


def test_given_parameters_that_do_not_fit_are_all_named():
    wrong = js.Model(
        {"w": np.zeros((13, 8), np.float32), "b": np.zeros(9, np.int32), "more": np.zeros(2)}, given().state
    )
    message = (
        r"(?s)init_from does not fit the layout; give what init_fn returns.*scale: missing, expected float32\[\]"
        r".*more: unexpected, float32\[2\].*/b: expected float32\[9\], got int32\[9\]"
        r".*/w: expected float32\[13, 9\], got float32\[13, 8\]"
    )
    with pytest.raises(ValueError, match=message):
        js.init(small_init, TX, small(), 0, init_from=wrong)
    with pytest.raises(
        ValueError, match=r"(?s)init_from does not fit the layout.*state/mean: missing, expected float32\[9\]"
    ):
        js.init(small_init, TX, small(), 0, init_from=given().params)


# What changed since the layout was made.


def test_another_init_fn_than_the_layouts():
    def other(key):
        model = small_init(key)
        return model._replace(params=model.params | {"w": jnp.zeros((13, 10)), "extra": jnp.zeros(1)})

    message = (
        r"(?s)the parameters changed since the layout was made; make the layout again from the same init_fn and tx"
        r".*extra: unexpected, float32\[1\].*w: expected float32\[13, 9\], got float32\[13, 10\]"
    )
    with pytest.raises(ValueError, match=message):
        js.init(other, TX, small(), 0)


def test_another_state_than_the_layouts():
    def other(key):
        return small_init(key)._replace(state={"mean": jnp.zeros(9)})

    with pytest.raises(ValueError, match=r"(?s)the model's state changed.*count: missing, expected int32\[\]"):
        js.init(other, TX, small(), 0)


def test_another_optimizer_than_the_layouts():
    with pytest.raises(ValueError, match=r"(?s)tx is not the one that the layout was made for.*mu/w: missing"):
        js.init(small_init, optax.sgd(0.1), small(), 0)
    with pytest.raises(ValueError, match=r"(?s)tx is not the one that the layout was made for.*mu/w: missing"):
        js.init(small_init, optax.sgd(0.1), small(), 0, init_from=given())
