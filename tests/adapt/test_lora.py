"""`js.lora`: a frozen base and trained factors, under every engine equal to one device, for every kind of model."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from jaxshard.core.low_rank import map_low_rank
from tests.toys import CLASSES, FEATURES

TX = optax.adam(1e-2)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 9)).astype(np.int32)}


@cache
def base_model():
    return js.models.llama(vocab=64, width=32, depth=2, heads=4, kv_heads=2, hidden=64, seq=8)


def tune(**options):
    model = base_model()
    return js.lora(model.init, model.loss, **{"rank": 2, "match": ["*_proj/kernel"], "alpha": 4} | options)


def moved(init_fn):
    """The init_fn with second factors that are not zero, so that every gradient says something."""

    def init(key):
        return map_low_rank(lambda x: dataclasses.replace(x, b=0.1 * jax.random.normal(key, x.b.shape)), init_fn(key))

    return init


# Per block: 4 bytes * rank 2 * (in + out) of q and o (32, 32), k and v (32, 16), gate, up and down (32, 64).
FACTORS = 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
TENSOR, PIPE = {"data": 4, "tensor": 2}, {"pipe": 2, "data": 4}
SPLIT = js.fsdp(min_size=0)
CELLS = {
    # name: (strategy, mesh, engine, {(kind of reduction, axis): bytes per device and step}). The layout of js.tensor
    # splits a factor as its matrix: of q, k, v, gate and up `b`, of o and down `a`.
    "auto": (SPLIT, {"data": 8}, js.auto(), {("all-reduce", "data"): 2 * FACTORS}),
    "explicit": (SPLIT, {"data": 8}, js.explicit(), {("reduce-scatter", "data"): 2 * FACTORS}),
    "end": (
        js.zero2(min_size=0), {"data": 8}, js.explicit(microbatches=2, scatter="end"),
        {("reduce-scatter", "data"): 2 * FACTORS},
    ),
    "hsdp": (
        js.hsdp(min_size=0), {"replica": 2, "data": 4}, js.explicit(remat="nothing"),
        {("reduce-scatter", "data"): 2 * FACTORS, ("all-reduce", "replica"): FACTORS // 2},
    ),
    "tensor": (js.compose(SPLIT, js.tensor()), TENSOR, js.explicit(), None),
    "auto-tensor": (js.compose(SPLIT, js.tensor()), TENSOR, js.auto(), None),
    "pipe": (
        js.compose(SPLIT, js.pipeline(chunks=1)), PIPE, js.pipelined(microbatches=2),
        {("reduce-scatter", "data"): FACTORS},
    ),
    "zero-bubble": (
        js.compose(SPLIT, js.pipeline(chunks=1)), PIPE,
        js.pipelined(microbatches=2, schedule="zero_bubble", stash="everything", scatter="each"), None,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_every_engine_equals_one_device_and_reduces_gradients_of_factors_alone(cell):
    strategy, axes, engine, expected = CELLS[cell]
    mesh, tuned = js.make_mesh(**axes), tune(base="int8")
    js.parity(moved(tuned.init), tuned.loss, TX, strategy, mesh, BATCH, engine=engine).check()
    layout = js.layout(strategy, mesh, tuned.init, TX)
    step = js.make_step(tuned.loss, TX, layout, engine=engine)
    assert js.audit(step, BATCH).ok
    compiled = step.compile(BATCH)
    assert compiled.memory_analysis().argument_size_in_bytes == layout.argument_bytes(BATCH)
    found = js.plan.arrays_only(js.collectives(compiled, mesh), above=2)
    # Under ZeRO-2 parameters rest whole, and nothing of the base is gathered.
    assert ("s8" in {one.dtype for one in found if one.kind == "all-gather"}) == (cell != "end")
    reduced = {}
    for one in found:
        if "reduce" in one.kind and one.axes[0] not in ("tensor", "pipe"):
            reduced[one.kind, *one.axes] = reduced.get((one.kind, *one.axes), 0) + one.bytes
    # Whatever the engine: no more than the gradients of the factors, which the schedule of a pipeline may sum by turns.
    assert reduced == expected if expected else sum(reduced.values()) <= 8 * FACTORS


def test_gradients_and_optimizer_state_are_those_of_the_factors():
    layout = js.layout(SPLIT, js.make_mesh(data=8), tune().init, TX)
    sizes = layout.bytes_per_device()
    assert (sizes["grad"], sizes["opt"]) == (2 * FACTORS // 8, 2 * 2 * FACTORS // 8 + 4)
    assert not any(jax.tree.leaves(layout.trainable["embed"]))


# Other kinds of models: functions, Linen, NNX. Rows of 13 numbers in 7 classes.


def rows():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(16, FEATURES)).astype(np.float32), "y": rng.integers(0, CLASSES, 16, dtype=np.int32)}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(FEATURES)(jnp.tanh(nn.Dense(32)(x)))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(LinenBlock()(LinenBlock()(x)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(FEATURES, 32, rngs=rngs), nnx.Linear(32, FEATURES, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.one, self.two = NnxBlock(rngs), NnxBlock(rngs)
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.two(self.one(x)))


def module_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return js.Mean(losses.sum(), losses.size)


def plain():
    def init_fn(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (FEATURES, 32)) / 4, "down": jax.random.normal(down, (32, CLASSES)) / 4}

    def loss_fn(params, batch, key):
        return module_loss(lambda x: jnp.tanh(x @ params["up"]) @ params["down"], batch)

    return init_fn, loss_fn, ["up", "down"]


def linen():
    return *js.linen(LinenMLP(), module_loss, rows()), ["LinenBlock_*/Dense_?/kernel"]


def nnx_model():
    return *js.nnx(lambda rngs: NnxMLP(rngs), module_loss), ["up/kernel", "down/kernel"]


MODELS = {
    "plain": (plain, js.explicit()),
    "linen": (linen, js.explicit()),
    "nnx": (nnx_model, js.auto()),
    "linen-units": (linen, js.explicit(units=[LinenBlock])),
    "nnx-units": (nnx_model, js.explicit(units=[NnxBlock])),
    "linen-auto-units": (linen, js.auto(units=[LinenBlock])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind_equal_one_device_and_the_merged_model(name):
    make, engine = MODELS[name]
    *pair, match = make()
    init_fn, loss_fn = js.lora(*pair, rank=2, match=match, base="int8")
    init, mesh, batch = moved(init_fn), js.make_mesh(data=8), rows()
    js.parity(init, loss_fn, TX, SPLIT, mesh, batch, engine=engine).check()
    model = init(jax.random.key(0))
    merged = pair[1](js.merge_lora(model), batch, jax.random.key(1))
    np.testing.assert_allclose(loss_fn(model, batch, jax.random.key(1)).value, merged.value, atol=1e-5)
    step = js.make_step(loss_fn, TX, js.layout(SPLIT, mesh, init, TX), engine=engine)
    assert js.audit(step, batch).ok
    found = js.plan.arrays_only(js.collectives(step.compile(batch), mesh), above=2)
    assert "s8" in {one.dtype for one in found if one.kind == "all-gather"}
    widest = max(max(np.prod(shape) for shape in one.shapes) for one in found if "reduce" in one.kind)
    assert widest <= 32 * 2  # a factor [32, 2], and not a base [32, 13]


@pytest.mark.slow
def test_a_model_starts_as_its_base_and_keeps_its_matrices_shapes():
    model, tuned = base_model(), tune()
    key = jax.random.key(3)
    base, params = jax.jit(lambda key: (model.init(key), tuned.init(key)))(key)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(js.merge_lora)(params), base)
    q, o = params["blocks"]["q_proj"]["kernel"], params["blocks"]["o_proj"]["kernel"]
    assert (q.a.shape, q.b.shape, q.gain) == ((2, 32, 2), (2, 2, 4, 8), 2.0)
    assert (o.a.shape, o.b.shape) == ((2, 4, 8, 2), (2, 2, 32))
    assert tuned.model.seq == model.seq and js.lora(*plain()[:2], rank=1, match=["up"]).loss


def test_experts_have_factors_of_their_own():
    def init_fn(key):
        return {"moe": {"wi": jnp.ones((8, 4, 6)), "wo": jnp.ones((8, 6, 4))}}

    made = jax.eval_shape(js.lora(init_fn, lambda *_: 0.0, rank=2, match=["moe/*"]).init, jax.random.key(0))
    assert made["moe"]["wi"].a.shape == (8, 4, 2) and made["moe"]["wi"].b.shape == (8, 2, 6)


BOTH = js.fsdp(("data", "expert"), min_size=0)
EXPERT_CELLS = {
    "expert": (js.compose(BOTH, js.expert()), {"data": 2, "expert": 4}, js.explicit()),
    "auto": (SPLIT, {"data": 8}, js.auto()),
}


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "int8"])
@pytest.mark.parametrize("cell", EXPERT_CELLS)
def test_factors_of_experts_are_trained_as_on_one_device(cell, base):
    strategy, axes, engine = EXPERT_CELLS[cell]
    sizes = {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 8}
    model, mesh = js.models.moe(**sizes, experts=4, k=2), js.make_mesh(**axes)
    tuned = js.lora(model.init, model.loss, rank=2, match=["experts/*_proj", "q_proj/kernel"], base=base)
    js.parity(moved(tuned.init), tuned.loss, TX, strategy, mesh, BATCH, engine=engine).check()

    layout = js.layout(strategy, mesh, tuned.init, TX)
    step = js.make_step(tuned.loss, TX, layout, engine=engine)
    run = js.init(tuned.init, TX, layout, 0)
    before = jax.device_get(js.logical(run, layout).params)
    losses = []
    for _ in range(10):
        run, metrics = step(run, BATCH)
        losses.append(float(metrics["loss"]))
    after = js.logical(run, layout).params
    assert losses[-1] < losses[0]
    one, other = before["blocks"]["experts"]["up_proj"], after["blocks"]["experts"]["up_proj"]
    jax.tree.map(np.testing.assert_array_equal, (one.base, one.scale), (other.base, other.scale))
    assert (np.abs(other.b).max((-2, -1)) > 0).all()  # of every expert of both blocks
    np.testing.assert_allclose(
        model.evaluate(js.merge_lora(after), BATCH)["loss"].value, tuned.evaluate(after, BATCH)["loss"].value, rtol=1e-5
    )


def test_what_does_not_fit_is_refused_by_name():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"'nothing' matches no parameter; there are blocks/attn_norm/scale"):
        jax.eval_shape(tune(match=["nothing", "q_proj/kernel"]).init, key)
    with pytest.raises(ValueError, match=r"'q_proj' matches no parameter; did you mean 'q_proj/kernel'\?"):
        jax.eval_shape(tune(match=["q_proj"]).init, key)
    with pytest.raises(ValueError, match=r"blocks/attn_norm/scale float32\[2, 32\]: no floating-point matrix"):
        jax.eval_shape(tune(match=["attn_norm/scale"]).init, key)
    with pytest.raises(ValueError, match=r"k_proj/kernel \[2, 32, 2, 8\]: rank 17 is larger than a side of 32 x 16"):
        jax.eval_shape(tune(match=["k_proj/kernel"], rank=17).init, key)
    with pytest.raises(TypeError, match=r"write \['q_proj/kernel'\]"):
        tune(match="q_proj/kernel")
    with pytest.raises(ValueError, match="rank must be at least 1"):
        tune(rank=0)
    with pytest.raises(ValueError, match="base must be None, 'bf16' or 'int8'"):
        tune(base="int4")
    with pytest.raises(AttributeError, match=r"js\.merge_lora"):
        _ = js.lora(*plain()[:2], rank=1, match=["up"]).evaluate
