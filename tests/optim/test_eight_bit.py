"""Adam with moments in 8 bits: its bytes and error, the same bits on every mesh, no more collectives than Adam's."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.tree import bytes_of
from tests.training.test_optimizers import Given, host

from . import fast_jit

PyTree = Any
SHAPES = {"w": (256, 1024), "out": {"kernel": (1024, 512), "bias": (8192,)}, "heads": (64, 8, 64), "norm": (256,)}
RULES = [("w", ("embed", "mlp")), ("kernel", ("mlp", "embed")), ("heads", ("embed", "heads", "head_dim")), *js.RULES]
CUT = {"w": (257, 768), "padded": {"kernel": (250, 301)}, "kernel": (1024, 256), "heads": (19, 6, 173)}
MESHES = {
    "ddp": (js.ddp(), {"data": 8}),
    "zero1": (js.zero1(), {"data": 8}),
    "zero2": (js.zero2(), {"data": 8}),
    "fsdp": (js.fsdp(), {"data": 8}),
    "hsdp": (js.hsdp(), {"replica": 2, "data": 4}),
    "tensor": (js.compose(js.fsdp(), js.tensor(RULES)), {"data": 4, "tensor": 2}),
}
STEPS = 3


def values(seed: int, shapes: PyTree = SHAPES) -> PyTree:
    """Magnitudes over three decades, as gradients have them."""
    rng = np.random.default_rng(seed)

    def one(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape)).astype(np.float32)

    return jax.tree.map(one, shapes, is_leaf=lambda x: type(x) is tuple)


def make_init(shapes: PyTree) -> Any:
    def init(key: jax.Array) -> js.Model:
        params = jax.tree.map(jnp.asarray, values(0, shapes))
        return js.Model(params, jax.tree.map(jnp.zeros_like, params))

    return init


def one_device(tx: Any, shapes: PyTree) -> PyTree:
    params = jax.tree.map(jnp.asarray, values(0, shapes))
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        params, state = step(params, state, values(number + 1, shapes))
    return jax.device_get((params, state))


def sharded(tx: Any, mesh: str, shapes: PyTree) -> tuple[PyTree, js.TrainState, js.Layout]:
    strategy, sizes = MESHES[mesh]
    init = make_init(shapes)
    layout = js.layout(strategy, js.make_mesh(**sizes), init, tx)
    run = js.init(init, tx, layout, 0)
    step = js.make_step(lambda model, batch, key: 0.0, tx, layout, engine=Given(), guarded=False)
    for number in range(STEPS):
        run = run._replace(state=jax.device_put(values(number + 1, shapes), layout.shardings(layout.state)))
        run, _ = step(run, {"rows": np.zeros(8, np.float32)})
    return (host(run.params, layout.params), host(run.opt_state, layout.opt_state)), run, layout


def collectives(tx: Any, mesh: str, shapes: PyTree) -> Counter[str]:
    """Kind and type of every collective of a compiled step whose gradients are given."""
    strategy, sizes = MESHES[mesh]
    layout = js.layout(strategy, js.make_mesh(**sizes), make_init(shapes), tx)
    step = js.make_step(lambda model, batch, key: 0.0, tx, layout, engine=Given(), guarded=False)
    text = step.compile({"rows": np.zeros(8, np.float32)}).as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (\S+|\([^)]*\)) ({kinds})(?:-start)?\(", text)
    return Counter(f"{kind} {re.sub(r'{[^}]*}', '', what)}" for what, kind in found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_and_state_are_those_of_one_device_bit_for_bit(mesh: str) -> None:
    """Exact, for given gradients: codes, scales and parameters."""
    tx = js.optim.adam8bit(1e-2, weight_decay=0.1)
    after, _, _ = sharded(tx, mesh, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, after, one_device(tx, SHAPES))


def test_parameters_are_those_of_one_device_within_1e_6() -> None:
    """Compiled for speed of compilation two programs may round an addition differently."""
    tx, shapes = js.optim.adam8bit(1e-2), {"w": SHAPES["w"]}
    after, _, _ = sharded(tx, "fsdp", shapes)
    np.testing.assert_allclose(after[0]["w"], one_device(tx, shapes)[0]["w"], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "tensor"])
def test_blocks_that_devices_cut_change_no_bit(mesh: str) -> None:
    """Exact: parts of 96 and 32 elements, an array that is padded along its blocks, one without a divisor."""
    tx = js.optim.adam8bit(1e-2)
    after, _, _ = sharded(tx, mesh, CUT)
    jax.tree.map(np.testing.assert_array_equal, after, one_device(tx, CUT))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "zero1"])
def test_no_collective_more_than_adam(mesh: str) -> None:
    eight, full = (collectives(tx, mesh, SHAPES) for tx in (js.optim.adam8bit(1e-2), optax.adam(1e-2)))
    assert eight == full


@pytest.mark.slow
def test_blocks_that_devices_cut_exchange_scales_alone() -> None:
    """Of f32[257, 768] in parts of 96 with blocks of 192: f32[257, 1] all-reduced, f32[257, 4] gathered, per moment."""
    shapes = {"table": (257, 768)}
    eight, full = (collectives(tx, "fsdp", shapes) for tx in (js.optim.adam8bit(1e-2), optax.adam(1e-2)))
    sizes = [int(n) * int(m or 1) for text in eight - full for n, m in re.findall(r"f32\[(\d+)(?:,(\d+))?", text)]
    assert max(sizes, default=0) <= 257 * 4


def test_scales_lie_with_their_blocks() -> None:
    tx = js.optim.adam8bit(1e-2)
    mesh = js.make_mesh(data=8)
    state = js.layout(js.fsdp(), mesh, make_init(SHAPES), tx).opt_state[0]
    kernel, scales = state.mu["out"]["kernel"], state.nu_scales["out"]["kernel"]
    assert kernel.store == scales.store == jax.sharding.PartitionSpec("data", None)
    assert scales.view.stored == (1024, 4)
    table = js.layout(js.fsdp(), mesh, make_init({"table": (256, 30, 768)}), tx).opt_state[0]
    assert table.mu_scales["table"].store == jax.sharding.PartitionSpec("data", None, None)


@pytest.mark.parametrize(
    "shapes", [{"w": (64, 65)}, {"w": (257, 33)}, {"w": (4097,)}, {"w": (300, 257)}, {"w": (64, 3, 43)}, SHAPES]
)
def test_state_has_at_most_2_1_bytes_per_parameter(shapes: PyTree) -> None:
    """Over arrays of more than 4,096 elements; the others keep f32."""
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple)
    state = jax.eval_shape(js.optim.scale_by_adam8bit().init, params)
    small = sum(x.size for x in jax.tree.leaves(params) if x.size <= 4096)
    large = sum(x.size for x in jax.tree.leaves(params)) - small
    total = sum(bytes_of(x.shape, x.dtype) for x in jax.tree.leaves(state))
    assert total - 8 * small - 4 <= 2.1 * large


def test_first_update_is_adam_s() -> None:
    """1e-6: an update is made of moments that were not rounded yet. In f32, whatever the gradient's dtype."""
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), values(1, {"w": (96, 130), "norm": (256,)}))
    eight, full = js.optim.scale_by_adam8bit(), optax.scale_by_adam()
    (one, state), (other, _) = (
        fast_jit(tx.update)(grads if tx is eight else wide, tx.init(wide))
        for wide in [jax.tree.map(lambda x: x.astype(jnp.float32), grads)]
        for tx in (eight, full)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one, other)
    assert {x.dtype for x in jax.tree.leaves(one)} == {jnp.dtype("float32")}
    assert int(state.steps) == 1


def test_apply_if_finite_goes_around_it() -> None:
    """Types of updates are those of `optax.adam`: by that of the parameter, and of the gradient where that is low."""
    params = {"w": jnp.ones((64, 128), jnp.bfloat16), "half": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}

    def types(tx: Any, grads: PyTree) -> PyTree:
        updates = jax.eval_shape(lambda: tx.update(grads, tx.init(params), params)[0])
        return jax.tree.map(lambda x: str(x.dtype), updates)

    eight, full = js.optim.adam8bit(1e-3), optax.adam(1e-3)
    assert types(optax.apply_if_finite(eight, 3), params) == {"w": "bfloat16", "half": "float16", "norm": "float32"}
    for grads in (params, jax.tree.map(lambda x: x.astype(jnp.float32), params)):
        assert types(eight, grads) == types(full, grads)
    assert types(eight, params | {"norm": params["norm"].astype(jnp.bfloat16)})["norm"] == "float32"


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_hyperparameters_can_be_injected(weight_decay: float) -> None:
    """1e-4 of the update that numbers give: one more rounding of 1 - b2. 0 is no decay."""
    params = {"w": jnp.ones((64, 128)), "bias": jnp.ones(3)}
    plain = js.optim.adam8bit(1e-3, weight_decay=weight_decay)
    injected = optax.inject_hyperparams(js.optim.adam8bit)(1e-3, weight_decay=weight_decay)
    one, other = (fast_jit(lambda tx=tx: tx.update(params, tx.init(params), params)[0])() for tx in (plain, injected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), one, other)


@pytest.mark.slow
def test_200_steps_with_outliers_stay_finite_and_bounded() -> None:
    """Every step a few elements of the gradient are 1e6 times the others; updates are at most 10 in size, as Adam's."""
    shapes = {"w": (64, 256)}
    tx = js.optim.scale_by_adam8bit()

    def step(state: PyTree, key: jax.Array) -> tuple[PyTree, jax.Array]:
        one, two = jax.random.split(key)
        grad = jax.random.normal(one, shapes["w"]) * jnp.where(jax.random.bernoulli(two, 1e-3, shapes["w"]), 1e6, 1.0)
        updates, state = tx.update({"w": grad}, state)
        return state, jnp.abs(updates["w"]).max()

    start = tx.init({"w": jnp.zeros(shapes["w"])})
    state, largest = fast_jit(lambda: jax.lax.scan(step, start, jax.random.split(jax.random.key(0), 200)))()
    assert np.isfinite(largest).all() and largest.max() <= 10
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.slow
def test_blocks_of_a_model_are_quantised_as_single_ones() -> None:
    """1e-6, codes exactly, through `per_block`: three stacked blocks, each with an array too small for 8 bits."""
    stacked = {"blocks": {"w": (3, 64, 96), "bias": (3, 2000)}, "head": (96, 70)}
    single = {"w": (64, 96), "bias": (2000,)}
    tx = js.optim.scale_by_adam8bit()
    per_block = js.optim.per_block(tx)
    params, grads = values(0, stacked), values(1, stacked)
    updates, state = fast_jit(per_block.update)(grads, per_block.init(params), params)
    update = fast_jit(tx.update)
    for block in range(3):
        part = jax.tree.map(lambda x, block=block: x[block], grads["blocks"])
        expected, inner = update(part, tx.init(part))
        jax.tree.map(lambda a, b, i=block: np.testing.assert_allclose(a[i], b, rtol=1e-6), updates["blocks"], expected)
        np.testing.assert_array_equal(state.blocks.mu["blocks"]["w"][block], inner.mu["w"])
    assert state.blocks.mu["blocks"]["bias"].dtype == jnp.float32
    assert jax.tree.map(jnp.shape, expected) == single
