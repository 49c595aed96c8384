"""Activations that are kept, offloaded or computed again by name: the numbers, what is kept, and what is refused."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from tests.engines.programs import tpu

NAMES = ("block_in", "qkv", "attention_out", "attention_proj", "mlp_hidden")
SHAPES = {
    "llama-1m": {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 12},
    "gpt-1m": {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "seq": 12},
}
POLICIES = {
    "saved": dict.fromkeys(NAMES, "save"),
    "offloaded": dict.fromkeys(NAMES, "offload"),
    "mixed": {"attention_out": "save", "mlp_hidden": "offload", "qkv": "remat"},
    "nothing": {},
}
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 13), dtype=np.int32)}
TX = optax.sgd(0.1)
STAGES = js.compose(js.fsdp(min_size=0), js.pipeline("pipe", chunks=1))


@cache
def model_of(size):
    return js.models.make(size, **SHAPES[size])


def check_equal(engine, size="llama-1m", axes=None, strategy=None):
    """Loss 1e-6, gradients 1e-5."""
    model, mesh = model_of(size), js.make_mesh(**(axes or {"data": 8}))
    strategy = strategy or js.fsdp(min_size=0)
    js.parity(model.init, model.loss, TX, strategy, mesh, BATCH, engine=engine).check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:remat. on a CPU")
@pytest.mark.parametrize("engine", ["explicit", "auto"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SHAPES)
def test_every_policy_has_the_gradients_of_one_device(engine, policy, size):
    """Loss 1e-6, gradients 1e-5."""
    check_equal(getattr(js, engine)(remat=POLICIES[policy]), size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:remat. on a CPU")
@pytest.mark.parametrize("engine", ["explicit", "auto"])
def test_beside_tensor_parallelism_and_micro_batches(engine):
    """Loss 1e-6, gradients 1e-5."""
    made = getattr(js, engine)(remat=POLICIES["mixed"], microbatches=2)
    strategy = js.compose(js.fsdp(min_size=0), js.tensor())
    check_equal(made, "llama-1m", {"data": 4, "tensor": 2}, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["saved", "nothing"])
def test_a_pipelines_stash(policy):
    """Loss 1e-6, gradients 1e-5."""
    engine = js.pipelined(microbatches=2, stash=POLICIES[policy])
    check_equal(engine, "llama-1m", {"data": 4, "pipe": 2}, STAGES)


def test_what_is_kept_is_not_computed_again_and_weights_are_gathered_again_all_the_same():
    def init(key):
        return {"embed": jnp.ones((16, 16)), "block": {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}}

    def block(params, x, key):
        return x + checkpoint_name(jnp.sin(x @ params["up"]), "hidden") @ params["down"]

    def head(params, x, batch, key):
        return js.Mean((x**2).sum(), len(x))

    model = js.Stacked(lambda params, batch, key: batch["x"] @ params["embed"], block, head, 2, init)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, TX)

    def counts(policy):
        step = js.make_step(model.loss, TX, layout, engine=js.explicit(remat=policy))
        text = step.lower({"x": np.ones((16, 16), np.float32)}).as_text()
        return [text.count(kind) for kind in ("sine", "all_gather")]

    nothing, saved = counts("nothing"), counts({"hidden": "save"})
    assert 0 < saved[0] < nothing[0] and saved[1] == nothing[1] > 0


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(jnp.sin(nn.Dense(32)(x)), "hidden")
        return x + nn.Dense(16)(h)


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Layer()(x)
        return x


def unit_step(**options):
    batch = {"x": np.ones((16, 16), np.float32)}
    model = js.linen(Loop(), lambda model, batch: js.Mean((model(batch["x"]) ** 2).sum(), len(batch["x"])), batch)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, TX)
    return js.make_step(model.loss, TX, layout, engine=js.explicit(**options)), batch


@pytest.mark.slow
def test_units_keep_what_the_user_named():
    def sines(policy):
        step, batch = unit_step(units=[Layer], remat=policy)
        return step.lower(batch).as_text().count("stablehlo.sine")

    assert sines("nothing") > sines({"hidden": "save"}) > 0
    with pytest.raises(ValueError, match="no activation is named 'hide'; there are 'hidden'"):
        sines({"hide": "save"})


def test_a_loss_without_blocks_and_units_has_nothing_to_keep():
    step, batch = unit_step(remat={"hidden": "save"})
    with pytest.raises(TypeError, match=r"remat: activations are kept by name in the blocks of a js.Stacked model"):
        step.lower(batch)


@pytest.mark.slow
def test_the_model_states_what_an_engine_is_not_told():
    def products(stated, told):
        model = js.models.make("llama-1m", **SHAPES["llama-1m"])
        model.remat = stated
        layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, TX)
        step = js.make_step(model.loss, TX, layout, engine=js.explicit(remat=told))
        return step.lower(BATCH).as_text().count("dot_general")

    assert products("everything", {}) == products("nothing", None) > products(None, None)


def test_sizes_state_what_they_keep():
    stated = {name: getattr(js.models.make(name), "remat", None) for name in js.models.SIZES}
    assert stated["gpt-1m"] == stated["gpt2"] == stated["llama-1m"] == "everything"
    assert {stated[name] for name in ("gpt2-xl", "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b")} == {"nothing"}


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["explicit", "auto"])
def test_an_offload_saves_device_memory_on_a_tpu(engine):
    """16 blocks of 8 rows of 1024 positions, width 4096: 1.07 GB of block inputs per device, in the host's memory."""
    mesh = topology_mesh("v5e:2x4", data=8)
    model = js.models.make("llama2-7b", depth=16, seq=1024, vocab=4096, hidden=8192)
    layout = js.layout(js.fsdp(), mesh, model.init, TX)
    batch = {"tokens": jax.ShapeDtypeStruct((64, 1025), jnp.int32)}

    def temporaries(policy):
        step = js.make_step(model.loss, TX, layout, engine=getattr(js, engine)(precision="bf16", remat=policy))
        memory = step.lower(batch).compile().memory_analysis()
        return memory.temp_size_in_bytes, memory.host_temp_size_in_bytes

    (kept, no_host), (left, host) = temporaries("nothing"), temporaries({"block_in": "offload"})
    inputs = 16 * 8 * 1024 * 4096 * 2
    assert no_host == 0 and host >= inputs
    assert kept - left > 0.9 * inputs
