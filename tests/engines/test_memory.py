"""Bytes per device: what a layout predicts for the arguments of a step is what was compiled; what FSDP saves."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.plan.memory.tiles import tiled_bytes
from tests.engines.programs import gpt_program, setups, tpu
from tests.toys import cross_entropy, quick_compile

pytestmark = pytest.mark.fast_cases(1)

PyTree = Any
TX = optax.adam(1e-3)
BATCH = {
    "x": np.zeros((16, 13), np.float32),
    "y": np.zeros(16, np.int32),
    "weights": np.ones(16, np.float32),
    "rate": np.float32(0.5),
}


def init_fn(key: jax.Array) -> js.Model:
    """13 -> 27 -> 1001 -> 7: no dimension is divisible by 4 or 8. A frozen matrix, a scalar, and state."""
    params = {
        "first": {"kernel": jax.random.normal(key, (13, 27)), "bias": jnp.zeros(27)},
        "wide": jax.random.normal(key, (27, 1001)),
        "last": jax.random.normal(key, (1001, 7)),
        "scale": jnp.ones(()),
        "frozen": jax.random.normal(key, (29, 5)),
    }
    return js.Model(params, {"mean": jnp.zeros(27), "seen": jnp.zeros((), jnp.int32)})


def loss_fn(model: js.Model, batch: PyTree, key: jax.Array) -> js.Loss:
    params, state = model
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    logits = jnp.tanh(hidden @ params["wide"]) @ params["last"] * params["scale"] + params["frozen"].sum()
    mean = state["mean"] + batch["rate"] * (hidden.mean(0) - state["mean"])
    return js.Loss(cross_entropy(logits, batch), {"mean": mean, "seen": state["seen"] + 1})


def layout_of(strategy: js.Strategy, mesh: jax.sharding.Mesh) -> js.Layout:
    return js.layout(strategy, mesh, init_fn, TX, trainable=lambda path: not path.startswith("frozen"))


def argument_bytes(layout: js.Layout, engine: Any) -> int:
    compiled = js.make_step(loss_fn, TX, layout, engine=engine).compile(BATCH)
    return compiled.memory_analysis().argument_size_in_bytes


# Per device, in elements. Trainable whole: 13 x 27 + 27 + 27 x 1001 + 1001 x 7 + 1 = 34,413; over 8 devices, padded,
# 13 x 4 + 4 + 27 x 126 + 126 x 7 + 1 = 4,341; over 4, 13 x 7 + 7 + 27 x 251 + 251 x 7 + 1 = 8,633. Frozen 29 x 5 = 145,
# 4 x 5 = 20 or 8 x 5 = 40. Adam has two of each trainable and a count. Everything has 4 bytes.
# On top of that state 27 x 4 + 4, batch (2 x 13 + 2 + 2 + 1) x 4, step 4, key 8: 248 bytes.
ARGUMENTS = {
    "ddp": 413_788,  # 4 x (34,558 + 2 x 34,413 + 1) + 248
    "zero1": 173_212,  # 4 x (34,558 + 2 x 4,341 + 1) + 248
    "zero2": 173_212,
    "fsdp": 52_424,  # 4 x (4,361 + 2 x 4,341 + 1) + 248
    "hsdp": 104_008,  # 4 x (8,673 + 2 x 8,633 + 1) + 248
}
ENGINES = [(strategy, js.explicit()) for strategy in reversed(ARGUMENTS)] + [("zero1", js.auto()), ("fsdp", js.auto())]


@pytest.mark.parametrize(("strategy", "engine"), ENGINES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_compiled_arguments_are_the_predicted_ones(strategy, engine):
    axes, made = setups(0)[strategy]
    layout = layout_of(made, js.make_mesh(**axes))
    assert layout.argument_bytes(BATCH) == ARGUMENTS[strategy]
    with quick_compile():
        assert argument_bytes(layout, engine) == ARGUMENTS[strategy]


def test_a_run_holds_what_the_layout_says():
    layout = layout_of(js.fsdp(min_size=0), js.make_mesh(data=8))
    run = js.init(init_fn, TX, layout, 0)
    resting = {"param": run.params, "opt": run.opt_state, "state": run.state}
    for role, tree in resting.items():
        for device in range(8):
            held = sum(x.addressable_shards[device].data.nbytes for x in jax.tree.leaves(tree))
            assert held == layout.bytes_per_device()[role]


# Six blocks of 12 x 512 x 512 + 13 x 512, embeddings of (256 + 64) x 512, an output of 512 x 256, 2 x 512 at the end:
# 19,210,240 parameters, 77 MB.
SIX_BLOCKS = {"vocab": 256, "width": 512, "depth": 6, "heads": 8, "seq": 64, "tied": False}


def six_blocks(engine: Any, *, rows: int = 8, opaque: bool = False) -> Any:
    """The memory analysis of one sequence of 64 bytes per device, SGD."""
    mesh, tx = js.make_mesh(data=8), optax.sgd(0.1)
    program = gpt_program(mesh, js.fsdp(), engine, tx=tx, rows=rows, opaque=opaque, **SIX_BLOCKS)
    assert sum(x.size for x in jax.tree.leaves(program.layout.shapes.params)) == 19_210_240
    return program.compiled.memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "limit"), [("nothing", 35e6), ("dots", 45e6)])
def test_one_block_at_a_time_is_whole(remat, limit):
    memory = six_blocks(js.explicit(remat=remat))
    assert memory.temp_size_in_bytes <= limit
    # 19,169,280 / 8 split elements and 40,960 whole ones, of 4 bytes; 65 tokens, the step and the key.
    assert memory.argument_size_in_bytes == 9_748_752


@pytest.mark.slow
def test_without_blocks_everything_is_whole():
    """The control: an engine that can't look into the loss gathers all weights, and holds all gradients, at once."""
    with quick_compile():
        memory = six_blocks(js.explicit(remat="nothing"), opaque=True)
    assert memory.temp_size_in_bytes >= 150e6


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "limit"), [("dots", 60e6), ("nothing", 50e6)])
def test_the_automatic_engine_holds_the_gradients_of_one_block(remat, limit):
    """Some 15 MB more: the CPU compiler sums a block's gradients in one all-reduce, and all are whole until then."""
    memory = six_blocks(js.auto(remat=remat))
    assert memory.temp_size_in_bytes <= limit


@pytest.mark.slow
def test_scattering_each_micro_batch_holds_no_whole_gradients():
    """Scattered at the end, whole gradients are summed up over the turns: 41 MB against 172."""
    each, end = (
        six_blocks(js.explicit(microbatches=2, remat="nothing", scatter=scatter), rows=16).temp_size_in_bytes
        for scatter in ("each", "end")
    )
    assert each <= 45e6
    assert end >= 150e6


def compiled_bytes(mesh: jax.sharding.Mesh, arrays: list[tuple[tuple[int, ...], Any]]) -> int:
    """The argument bytes of a program that receives the arrays whole and does nothing."""
    whole = NamedSharding(mesh, P())
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in arrays]
    nothing = jax.jit(lambda *args: jnp.zeros(()), keep_unused=True, out_shardings=whole)
    return nothing.lower(*args).compile().memory_analysis().argument_size_in_bytes


DTYPES = (
    *(jnp.float32, jnp.bfloat16) * 4,
    *(jnp.float16, jnp.float8_e4m3fn, jnp.int32, jnp.uint32, jnp.int16, jnp.int8, jnp.uint8, jnp.bool_, jnp.int4),
    jnp.complex64,
    jax.random.key(0).dtype,
)


def random_arrays(seed: int, count: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes of up to 4 dimensions: ones, small, powers of two and odd ones."""
    rng = random.Random(seed)
    sizes = [lambda: 1, lambda: rng.randint(2, 9), lambda: 2 ** rng.randint(0, 9), lambda: rng.randint(2, 700)]

    def shape() -> tuple[int, ...]:
        return tuple(rng.choice(sizes)() for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])))

    shapes = (shape() for _ in range(10 * count))
    fitting = [one for one in shapes if np.prod(one) < 3e6][:count]
    return [(one, rng.choice(DTYPES)) for one in fitting]


@tpu
@pytest.mark.parametrize(
    ("topology", "seed"), [("v5e:2x4", 0), ("v4:2x2x1", 1), ("v5p:2x2x1", 2), ("v6e:2x4", 3), ("tpu7x:2x2x1", 4)]
)
def test_tiles_are_those_of_the_compiler(topology, seed):
    mesh = topology_mesh(topology, data=-1)
    arrays = random_arrays(seed, 200)
    assert len(arrays) == 200
    expected = sum(tiled_bytes(*one) for one in arrays)
    if compiled_bytes(mesh, arrays) != expected:
        wrong = {one: (tiled_bytes(*one), compiled_bytes(mesh, [one])) for one in arrays}
        assert not {one: pair for one, pair in wrong.items() if pair[0] != pair[1]}
