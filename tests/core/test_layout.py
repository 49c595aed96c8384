"""Layouts of whole training runs, on shapes alone: bytes to the byte, every array placed and explained."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.placement import axes_of
from jaxshard.models.gpt import gpt
from tests.toys import model_order, quick_compile


def init_fn(key):
    return {
        "dense": {"kernel": jnp.zeros((1001, 24)), "bias": jnp.zeros((24,))},
        "scale": jnp.zeros(()),
        "table": jnp.zeros((16, 3), jnp.bfloat16),
    }


def layout(strategy, tx=None, init_fn=init_fn, **options):
    return js.layout(strategy, js.make_mesh(data=8), init_fn, tx or optax.adam(1e-3), **options)


PARAM = 1001 * 24 * 4 + 24 * 4 + 4 + 48 * 2
SPLIT = 1001 * 3 * 4 + 3 * 4 + 4 + 6 * 2


@pytest.mark.parametrize(
    ("strategy", "param", "grad", "opt"),
    [
        (js.ddp(), PARAM, PARAM, 2 * PARAM + 4),
        (js.zero1(min_size=0), PARAM, PARAM, 2 * SPLIT + 4),
        (js.zero2(min_size=0), PARAM, SPLIT, 2 * SPLIT + 4),
        (js.fsdp(min_size=0), SPLIT, SPLIT, 2 * SPLIT + 4),
    ],
)
def test_bytes_per_device(strategy, param, grad, opt):
    made = layout(strategy)
    assert made.bytes_per_device() == {"param": param, "grad": grad, "opt": opt, "state": 0}
    batch = {"x": jax.ShapeDtypeStruct((16, 5), jnp.float32), "rate": jax.ShapeDtypeStruct((), jnp.float32)}
    assert made.argument_bytes(batch) == param + opt + 4 + 8 + 16 * 5 * 4 // 8 + 4


def test_explain_names_every_array_and_why_it_stayed_whole():
    text = layout(js.compose(js.batch("data"), js.shard("data", ["opt", "param"], min_size=49))).explain()
    lines = {" ".join(line.split()[:2]): line for line in text.splitlines()}
    assert text.startswith("mesh: data=8; batch rows over data\n")
    assert "dim 1 over data" in lines["param dense/kernel"] and "[1001, 24]" in lines["param dense/kernel"]
    assert "12.01 kB" in lines["param dense/kernel"]
    assert "small: 24 elements, under 49" in lines["param dense/bias"]
    assert "one element" in lines["param scale"]
    assert "the strategy keeps it whole" in lines["grad dense/kernel"]
    assert "dim 1 over data" in lines["opt 0/mu/dense/kernel"]
    assert len(text.splitlines()) == 1 + 1 + 4 + 4 + 9 + 1
    assert all("whole" not in line or line.split("whole", 1)[1].split() for line in text.splitlines()[2:-1])
    padded = layout(js.fsdp(), init_fn=lambda key: {"w": jnp.zeros((1001, 17))}).explain()
    assert "padded to [1008, 17]" in padded and "dim 0 over data" in padded


# Optimizer state is placed by path and shape.

TRANSFORMS = {
    "masked": optax.masked(optax.adam(1e-3), {"kernel": True, "bias": False, "square": True}),
    "partition": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)}, {"kernel": "a", "bias": "b", "square": "b"}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_state_of_a_parameters_shape_lives_where_the_parameter_does(name):
    def init_fn(key):
        return {"kernel": jnp.zeros((40, 24)), "bias": jnp.zeros(17), "square": jnp.zeros((40, 40))}

    made = layout(js.fsdp(min_size=0), TRANSFORMS[name], init_fn)
    stores = {"kernel": P("data", None), "bias": P("data"), "square": P("data", None)}
    seen = 0
    for _, leaf, placement in (p for p in made.placed() if p.role == "opt"):
        name = leaf.path.split("/")[-1]
        if name in stores and leaf.shape == init_fn(None)[name].shape:
            assert placement.store == stores[name], leaf
            seen += 1
        elif leaf.size == 1:
            assert not axes_of(placement.store), leaf
    assert seen >= 3


def test_the_longest_path_wins_and_other_floats_are_filled():
    def init_fn(key):
        return {"w": jnp.zeros((8, 16)), "inner": {"w": jnp.zeros((8, 16))}}

    class Odd:
        @staticmethod
        def init(params):
            inner = params["inner"]
            return {"m": params, "rows": {"w": jnp.zeros(24)}, "n": jnp.zeros(64, jnp.int32), "alone": inner}

        update = None

    def by_path(role, leaf, placement, mesh):
        return placement.split(0, ("data",)) if role == "opt" and leaf.path == "inner/w" else placement

    tx = optax.GradientTransformation(Odd.init, lambda *args: args)
    made = layout(js.compose(js.batch("data"), by_path, js.shard("data", ["state"])), tx, init_fn)
    opt = made.opt_state
    assert opt["m"]["inner"]["w"].store == P("data", None)
    assert opt["m"]["w"].store == P(None, None)
    assert opt["alone"]["w"].store == P(None, None)
    filled = layout(js.fsdp(min_size=0), tx, init_fn).opt_state
    assert filled["rows"]["w"].store == P("data") and filled["n"].store == P(None)


# Meshes that nobody has.


def abstract(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_gpt2_xl_over_256_devices_is_within_a_tenth_of_ideal():
    """1600 % 256 != 0: whole arrays would cost 95 times the ideal. Parameters, gradients and each Adam moment."""
    model = gpt(vocab=50257, width=1600, depth=48, heads=25, seq=1024)
    made = js.layout(js.fsdp(), abstract(data=256), model.init, optax.adam(1e-3))
    count = sum(x.size for x in jax.tree.leaves(made.shapes.params))
    assert count == 1_557_611_200
    held, ideal = made.bytes_per_device(), 4 * count / 256
    assert ideal <= held["param"] <= 1.10 * ideal
    assert ideal <= held["grad"] <= 1.10 * ideal
    assert 2 * ideal <= held["opt"] <= 2 * 1.10 * ideal


@cache
def model_of_the_paper():
    full = gpt(vocab=61056, width=4096, depth=36, heads=32, seq=1024)
    shapes = jax.eval_shape(full.init, jax.random.key(0))

    def parts(key):
        block = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], jnp.bfloat16), shapes["blocks"])
        ends = {name: shapes[name] for name in ("embed", "head")}
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), ends) | {"block": block}

    return js.Stacked(full.embed, full.block, full.head, full.num_blocks, parts)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [(js.ddp(), 120), (js.zero1(), 31.41), (js.zero2(), 16.64), (js.fsdp(), 1.875)]
)
def test_bytes_of_the_zero_paper(strategy, gigabytes):
    """7.5 billion parameters over 64 devices, mixed-precision Adam, within 0.5 % (ZeRO, figure 1)."""
    made = js.layout(strategy, abstract(data=64), model_of_the_paper().init, js.optim.master(optax.adam(1e-3)))
    assert sum(x.size for x in jax.tree.leaves(made.shapes.params)) == pytest.approx(7.5e9, rel=1e-3)
    assert sum(made.bytes_per_device().values()) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


# Pipelines.


def nine_blocks(strategy, tx, **mesh):
    """Nine blocks and what is outside of them, all of odd sizes, and their layout."""

    def parts(key):
        keys = jax.random.split(key, 3)
        block = {"w": jax.random.normal(keys[0], (7, 5)), "b": jax.random.normal(keys[1], (5,))}
        return {"embed": jax.random.normal(keys[2], (3, 7)), "block": block, "head": {}}

    model = js.Stacked(lambda *args: None, lambda *args: None, lambda *args: None, num_blocks=9, init=parts)
    return model, js.layout(strategy, js.make_mesh(**mesh), model.init, tx)


def test_explain_tells_which_device_holds_which_blocks():
    strategy = js.compose(js.pipeline(chunks=2), js.fsdp(min_size=0))
    _, made = nine_blocks(strategy, optax.sgd(0.1), pipe=4, data=2)
    assert made.explain().splitlines()[:6] == [
        "mesh: pipe=4, data=2; batch rows over data",
        "pipeline: 9 blocks in 8 stages of 2, the last ones padded with 7 identities",
        "  pipe=0: blocks 0-1, 8",
        "  pipe=1: blocks 2-3, none",
        "  pipe=2: blocks 4-5, none",
        "  pipe=3: blocks 6-7, none",
    ]
    line = next(line for line in made.explain().splitlines() if line.startswith("param") and "blocks/w" in line)
    assert "dim 1 over pipe, dim 3 over data" in line
    assert "padded to [16, 8, 5]; in pipeline order [2, 4, 2, 8, 5]" in line
    # A device holds 2 x 2 of 16 blocks of (8 x 5 + 6) / 2 elements, and 3 x (7 + 1) / 2 of the embedding.
    assert made.bytes_per_device()["param"] == 4 * (4 * 23 + 12)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("per_block", [False, True])
def test_a_padded_pipeline_holds_what_init_makes_and_its_optimizer_state_likewise(per_block):
    """Bit for bit, in the model's order; zeros in the padding, moments where their parameters are."""
    tx = optax.adam(1e-3)
    tx = js.optim.per_block(tx) if per_block else tx
    strategy = js.compose(js.fsdp(min_size=0), js.pipeline(chunks=2))
    model, made = nine_blocks(strategy, tx, pipe=4, data=2)
    with quick_compile():
        run = js.init(model.init, tx, made, 3)
        expected = jax.jit(model.init)(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, model_order(made.params, run.params), jax.device_get(expected))
    for x, placement, one in zip(*map(jax.tree.leaves, (run.params, made.params, expected)), strict=True):
        assert x.sharding.spec == placement.store and x.shape == placement.view.stored
        assert np.count_nonzero(x) == np.count_nonzero(one)
    states = {p.leaf.path: p.placement for p in made.placed() if p.role == "opt"}
    for kind, moment in itertools.product(("blocks", "others"), ("mu", "nu")):
        name = f"{kind}/0/{moment}" if per_block else f"0/{moment}"
        if kind == "blocks":
            assert states[f"{name}/blocks/w"] == made.params["blocks"]["w"]
        else:
            assert states[f"{name}/embed"] == made.params["embed"]


# Bad input.


@pytest.mark.parametrize("tx", [1e-3, "adam", optax.adam, object()])
def test_no_optimizer(tx):
    with pytest.raises(TypeError, match=r"tx must be an optax GradientTransformation such as optax.adam"):
        js.layout(js.ddp(), js.make_mesh(data=8), init_fn, tx)


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (jax.nn.relu, "custom_jvp relu"),
        (jnp.tanh, "PjitFunction tanh"),
        (len, "builtin_function_or_method len"),
        ("relu", "str 'relu'"),
    ],
)
def test_a_model_with_leaves_that_are_no_arrays(leaf, what):
    """As an Equinox module has them."""
    with pytest.raises(TypeError, match=rf"(?s)eqx.partition and eqx.combine.*\n  - mlp/act: {what}$"):
        js.layout(js.ddp(), js.make_mesh(data=8), lambda key: {"mlp": {"act": leaf, "w": jnp.ones(3)}}, optax.sgd(0.1))


def test_no_strategy_and_no_mesh():
    with pytest.raises(TypeError, match=r"strategy must be a strategy such as js.fsdp\('data'\), got str"):
        layout("fsdp")
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh.*got dict"):
        js.layout(js.ddp(), {"data": 8}, init_fn, optax.sgd(0.1))
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"axis 'data' is not of type Auto.*js.make_mesh"):
        js.layout(js.ddp(), explicit, init_fn, optax.sgd(0.1))


@pytest.mark.parametrize("params", [{}, (), None, {"layer": {}}])
def test_no_parameters(params):
    with pytest.raises(ValueError, match="init_fn returned no parameters: expected a tree of floating-point arrays"):
        layout(js.fsdp(), init_fn=lambda key: params)


def test_integer_parameters_are_all_named():
    def init_fn(key):
        return {"w": jnp.zeros(3), "step": jnp.zeros((), jnp.int32), "table": {"ids": jnp.zeros((2, 5), jnp.uint8)}}

    message = r"(?s)move these to the state of js.Model.*trainable=.*step: int32\[\].*table/ids: uint8\[2, 5\]"
    with pytest.raises(TypeError, match=message):
        layout(js.fsdp(), init_fn=init_fn)
    frozen = layout(js.fsdp(), init_fn=init_fn, trainable=lambda path: path == "w")
    assert jax.tree.leaves(frozen.grads) == [frozen.params["w"]]


def test_parameters_that_are_no_arrays():
    with pytest.raises(TypeError, match=r"(?s)init_fn must return a tree of arrays.*\n  - w: str 'weights'$"):
        layout(js.fsdp(), init_fn=lambda key: {"w": "weights"})
    with pytest.raises(TypeError, match=r"init_fn must be a function init_fn\(key\), got dict"):
        layout(js.fsdp(), init_fn={"w": jnp.zeros(3)})


def test_trainable_as_a_tree_and_wrong_trees():
    mask = jax.tree.map(lambda _: False, init_fn(None)) | {"scale": True}
    assert [p.leaf.path for p in layout(js.ddp(), trainable=mask).placed() if p.role == "grad"] == ["scale"]
    with pytest.raises(ValueError, match="trainable froze every parameter: nothing is left to train"):
        layout(js.ddp(), trainable=lambda path: False)
    with pytest.raises(ValueError, match="tree of booleans like the parameters"):
        layout(js.ddp(), trainable={"dense": True})


def test_programs_of_cpu_devices_in_several_processes_dont_come_out_of_the_compilation_cache(tmp_path, monkeypatch):
    """Loaded from it they can hang."""
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_enable_compilation_cache": True}
    before = {name: getattr(jax.config, name) for name in settings}

    def made(devices):
        return js.layout(
            js.ddp(), js.make_mesh(jax.devices()[:devices], data=-1), lambda key: jnp.ones(8), optax.sgd(1)
        )

    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        made(8)
        assert jax.config.jax_enable_compilation_cache
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.warns(UserWarning, match="programs of CPU devices in several processes that are loaded from it"):
            made(8)
        assert not jax.config.jax_enable_compilation_cache
        made(8)  # warns once
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
