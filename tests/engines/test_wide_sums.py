"""Gradients of bf16 weights under `js.auto`, summed over devices in f32: a count of 263 rows, which bf16 can't hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.engines.wide_sums import sum_in, widen_sums
from tests.engines.programs import elements, gpt_program, setups, tpu

pytestmark = pytest.mark.fast_cases(1)

ROWS = 264  # 33 on each of 8 devices; one of them weighs nothing
EXACT, ROUNDED = 263, 264


def total(x):
    return jnp.sum(x.astype(jnp.float32))


def product(params, batch):
    return total(batch["x"] @ params["w"])


def bias(params, batch):
    return total((jnp.zeros((len(batch["x"]), 8), jnp.bfloat16) + params["w"][0]) * batch["x"][:, :1])


def embedding(params, batch):
    return total(params["w"][batch["zero"]] * batch["x"][:, :1])


def convolution(params, batch):
    return total(lax.conv_general_dilated(batch["x"][:, None], params["w"][:, None, :4], (1,), "VALID"))


def stacked(params, batch):
    """A scan over layers of the user's own: each one's gradient comes out of the loop stacked."""
    sums = lax.scan(lambda sum, w: (sum + total(batch["x"][:, :1] * w), None), 0.0, params["w"])
    return sums[0]


def over_time(params, batch):
    """One weight in every turn of a scan: its gradient is added up in the loop, of turns of 132 and 131 rows."""
    turns = batch["x"].reshape(ROWS // 2, 2, 4).swapaxes(0, 1)
    return lax.scan(lambda sum, x: (sum + total(x @ params["w"]), None), 0.0, turns)[0]


LOSSES = [product, bias, embedding, convolution, stacked, over_time]


def gradient(loss, engine, dtype=None, axes=None, strategy=None, rows=ROWS):
    """The gradient of the weight [4, 8], by a step of gradient descent from zero."""

    def loss_fn(params, batch, key):
        params = params if dtype is None else jax.tree.map(lambda w: w.astype(dtype), params)
        return js.Mean(loss(params, jax.tree.map(jnp.asarray, batch)), len(batch["x"]) / ROWS)

    mesh = js.make_mesh(**(axes or {"data": 8}))
    tx = optax.sgd(1.0)
    layout = js.layout(strategy or js.fsdp(min_size=0), mesh, lambda key: {"w": jnp.zeros((4, 8))}, tx)
    x = np.ones((rows, 4), jnp.bfloat16)
    x[-1] = 0
    run = js.init(lambda key: {"w": jnp.zeros((4, 8))}, tx, layout, jax.random.key(0))
    batch = {"x": x, "zero": np.zeros(rows, np.int32)}
    run, _ = js.make_step(loss_fn, tx, layout, engine=engine)(run, batch)
    return -np.asarray(js.logical(run, layout).params["w"])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_largest_gradient_is_exact(loss):
    """Equal to the count of rows, digit for digit; in bf16 it is rounded to an even number."""
    assert gradient(loss, js.auto(compute_dtype=jnp.bfloat16)).max() == EXACT


@pytest.mark.parametrize("name", ["zero2", "hsdp", "ddp", "zero1"])
def test_in_every_strategy(name):
    axes, strategy = setups(0)[name]
    assert gradient(product, js.auto(compute_dtype=jnp.bfloat16), None, axes, strategy).max() == EXACT


@pytest.mark.parametrize("scatter", ["each", "end"])
def test_with_micro_batches(scatter):
    """The mean of two turns, of 264 and of 263 rows."""
    engine = js.auto(compute_dtype=jnp.bfloat16, microbatches=2, scatter=scatter)
    assert gradient(product, engine, rows=2 * ROWS).max() == 263.5


def test_weights_that_the_loss_casts_itself():
    assert gradient(product, js.auto(), jnp.bfloat16).max() == EXACT


def test_a_sum_in_bf16_is_a_choice():
    assert gradient(product, js.auto(compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)).max() == ROUNDED


@pytest.mark.parametrize(
    ("x", "w", "axes"), [((2, 4), (4, 5), 1), ((2, 3, 4), (4, 5, 6), 1), ((2, 3, 4, 5), (4, 5, 6), 2)]
)
def test_a_transposed_gradient_is_the_product_of_its_operands_in_the_other_order(x, w, axes):
    """Otherwise the sum over devices is between the two, and the transpose a pass of its own."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in (x, w))

    def fn(x, w):
        return sum_in(jax.grad(lambda w: jnp.square(jnp.tensordot(x, w, axes)).sum())(w), jnp.float32)

    assert "transpose" in str(jax.make_jaxpr(fn)(x, w))
    assert "transpose" not in str(jax.make_jaxpr(widen_sums(fn))(x, w))
    ours, theirs = jax.jit(lambda x, w: (widen_sums(fn)(x, w), fn(x, w)))(x, w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_gradient_is_reduced_in_the_shape_of_its_weight():
    def loss_fn(params, batch, key):
        return js.Mean(jnp.square(batch["x"] @ params["w"]).sum(), 8)

    layout = js.layout(
        js.fsdp(min_size=0), js.make_mesh(data=8), lambda key: {"w": jnp.zeros((16, 24))}, optax.sgd(1.0)
    )
    step = js.make_step(loss_fn, optax.sgd(1.0), layout, engine=js.auto())
    text = step.compile({"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}).as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    assert any("f32[16,24]" in line for line in reduced) and not any("f32[24,16]" in line for line in reduced)


def test_what_others_use_too_keeps_its_dtype():
    """The product is asked for in bf16 as well: nothing is computed twice, and the gradient is cast behind it."""

    def fn(x, y):
        shared = x @ y
        return sum_in(shared, jnp.float32), shared

    x = jnp.ones((4, 4), jnp.bfloat16)
    text = str(jax.make_jaxpr(widen_sums(fn))(x, x))
    assert text.count("dot_general") == 1
    assert "preferred_element_type=bfloat16" in text


def sums_of(fn, *args):
    """The dtypes in which a traced function sums over several elements, and subtracts."""
    eqns = [eqn for eqn in jax.make_jaxpr(widen_sums(fn))(*args).eqns if eqn.primitive.name in ("reduce_sum", "sub")]
    return [(eqn.primitive.name, eqn.outvars[0].aval.dtype.name) for eqn in eqns]


def test_a_narrower_sum_is_in_f32_over_positions_and_in_bf16_over_rows():
    """The sum of 16 rows of 64 positions, as of a norm's scale in f32: wrong by 2 % if all of it were bf16."""
    x = jnp.full((16, 64, 3), 1.01)

    def fn(x):
        return sum_in(jnp.sum(x, (0, 1)).reshape(1, 3), jnp.bfloat16)

    assert sums_of(fn, x) == [("reduce_sum", "float32"), ("reduce_sum", "bfloat16")]
    np.testing.assert_allclose(np.asarray(widen_sums(fn)(x), np.float32), 1.01 * 1024, rtol=2**-8)


def test_a_difference_of_sums_keeps_its_digits():
    """1000.5 - 1000 is 0.5; in bf16 it is 0 or 4."""
    x = jnp.ones((1000, 1))

    def fn(x):
        return sum_in((x + 0.0005).sum(0) - x.sum(0), jnp.bfloat16)

    assert [kind for kind in sums_of(fn, x) if kind[1] == "bfloat16"] == []
    np.testing.assert_allclose(np.asarray(widen_sums(fn)(x), np.float32), 0.5, rtol=1e-2)


def test_a_narrower_gradient_of_a_convolution_is_cast_behind_it():
    """JAX refuses a convolution that is narrower than its operands, such as that of images in f32."""

    def fn(x, w):
        return sum_in(lax.conv(x, w, (1, 1), "SAME"), jnp.bfloat16)

    x, w = jnp.ones((2, 3, 4, 4)), jnp.full((5, 3, 1, 1), 1.01)
    np.testing.assert_array_equal(widen_sums(fn)(x, w), lax.conv(x, w, (1, 1), "SAME").astype(jnp.bfloat16))


def test_a_mark_that_nothing_widens_is_a_cast():
    assert jax.jit(lambda x: sum_in(x, jnp.float32))(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_tpu_programs_reduce_gradients_in_f32(name):
    """Gathers are in bf16, of which some of small weights are written as all-reduces; nothing is scattered in bf16."""
    axes, strategy = setups(2**14)[name]
    sizes = {"vocab": 512, "width": 256, "depth": 2, "heads": 4, "seq": 128}
    mesh = topology_mesh("v5e:2x4", **axes)
    compiled = gpt_program(mesh, strategy, js.auto(compute_dtype=jnp.bfloat16), rows=32, **sizes)
    assert {kind for kind, _ in elements(compiled, "bf16")} <= {"all-gather"}
    reduced = sum(n for (kind, _), n in elements(compiled, "f32").items() if kind in ("all-reduce", "reduce-scatter"))
    assert reduced >= 1_743_360  # every parameter once


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [js.fsdp(), js.ddp()], ids=["fsdp", "ddp"])
def test_tpu_programs_of_explicit_sum_in_the_parameters_dtype(strategy):
    """The gradient of an embedding's rows is made in bf16 and cast: the sum over devices has to come after the cast."""
    mesh = topology_mesh("v5e:2x4", data=8)
    model = js.models.gpt(vocab=512, width=256, depth=2, heads=4, seq=128)
    layout = js.layout(strategy, mesh, model.init, optax.adamw(1e-3))
    engine = js.explicit(compute_dtype=jnp.bfloat16)
    step = js.make_step(model.loss, optax.adamw(1e-3), layout, engine=engine)
    comparison = js.audit(step, {"tokens": jax.ShapeDtypeStruct((32, 129), jnp.int32)})
    assert comparison.ok, str(comparison)


ENGINES = {
    "auto": js.auto(precision="bf16"),
    "explicit": js.explicit(precision="bf16"),
    "pipelined": js.pipelined(microbatches=2, precision="bf16"),
}


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_tpu_programs_of_precision_bf16_move_nothing_in_f32(name):
    """Weights, gradients and the vectors of norms, which are computed in f32: all of them bf16 on the wire."""
    axes = {"data": 4, "pipe": 2} if name == "pipelined" else {"data": 8}
    strategy = js.compose(js.fsdp(), js.pipeline("pipe", chunks=1)) if name == "pipelined" else js.fsdp()
    mesh = topology_mesh("v5e:2x4", **axes)
    sizes = {"vocab": 512, "width": 256, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 512, "seq": 128}
    model = js.models.make("llama-1m", **sizes)
    layout = js.layout(strategy, mesh, model.init, optax.adamw(1e-3))
    step = js.make_step(model.loss, optax.adamw(1e-3), layout, engine=ENGINES[name])
    batch = {"tokens": jax.ShapeDtypeStruct((32, 129), jnp.int32)}
    comparison = js.audit(step, batch)
    assert comparison.ok, str(comparison)
    assert not [text for text in comparison.substitutes if "in f32" in text], comparison.substitutes
    arrays = js.plan.arrays_only(js.collectives(step.compile(batch), mesh), above=128)
    assert {array.dtype for array in arrays} == {"bf16"}
    assert sum(array.bytes for array in arrays if array.kind in ("all-reduce", "reduce-scatter")) > 0
