"""FLOPs against counts made by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxshard.core.mesh import make_mesh
from jaxshard.cost.flops import model_flops, train_flops
from jaxshard.models.gpt import gpt

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 16), jnp.float32)
PRODUCT = 2 * 4 * 8 * 16


def product(x, w):
    return x @ w


def test_products_and_nothing_else():
    assert model_flops(lambda x, w: jnp.tanh(x @ w).sum() + jnp.exp(x).max(), X, W) == PRODUCT
    assert train_flops(product, X, W) == 3 * PRODUCT


def test_batched_products():
    a, b = jax.ShapeDtypeStruct((3, 5, 4, 8), jnp.bfloat16), jax.ShapeDtypeStruct((3, 5, 8, 2), jnp.bfloat16)
    assert model_flops(lambda a, b: jnp.einsum("ijkl,ijlm->ijkm", a, b), a, b) == 2 * 3 * 5 * 4 * 8 * 2


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups):
    image, kernel = (
        jax.ShapeDtypeStruct((2, 6, 7, 8), jnp.float32),
        jax.ShapeDtypeStruct((3, 5, 8 // groups, 10), jnp.float32),
    )

    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups, dimension_numbers=numbers)

    assert model_flops(convolve, image, kernel) == 2 * (2 * 6 * 7 * 10) * (3 * 5 * 8 // groups)


def test_ragged_products():
    tokens, experts = jax.ShapeDtypeStruct((12, 8), jnp.float32), jax.ShapeDtypeStruct((3, 8, 5), jnp.float32)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert model_flops(jax.lax.ragged_dot, tokens, experts, sizes) == 2 * 12 * 8 * 5


def test_calls_are_looked_into():
    @jax.custom_vjp
    def custom(x, w):
        return x @ w

    custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    @jax.custom_jvp
    def tangent(x, w):
        return x @ w

    tangent.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))
    for fn in (jax.jit(product), jax.checkpoint(product), jax.jit(jax.checkpoint(jax.jit(product))), custom, tangent):
        assert model_flops(fn, X, W) == PRODUCT


def test_a_gradient_is_three_forward_passes_and_remat_a_fourth():
    grad = jax.grad(lambda x, w: (x @ w).sum() ** 2, argnums=(0, 1))
    assert model_flops(grad, X, W) == 3 * PRODUCT
    remat = jax.grad(lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w).sum(), argnums=(0, 1))
    assert model_flops(remat, X, W) == 4 * PRODUCT


def test_trips_and_branches():
    def scanned(x, w):
        return jax.lax.scan(lambda y, _: (y + x @ w, None), jnp.zeros((4, 16)), length=5)

    def looped(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, y: y + x @ w, jnp.zeros((4, 16)))

    def branched(x, w):
        return jax.lax.switch(
            x.sum().astype(int), [lambda: x @ w, lambda: (x @ w) + (2 * x) @ w, lambda: jnp.zeros((4, 16))]
        )

    assert model_flops(scanned, X, W) == 5 * PRODUCT
    assert model_flops(looped, X, W) == 7 * PRODUCT
    assert model_flops(branched, X, W) == 2 * PRODUCT


def test_unknown_trips_are_refused():
    def forever(x, w):
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + x @ w, jnp.zeros((4, 16)))

    with pytest.raises(ValueError, match=r"unknown number of times; use lax\.scan"):
        model_flops(forever, X, W)
    assert model_flops(lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x), X) == 0


def test_per_device_code_counts_on_every_device():
    mesh = make_mesh(data=4, tensor=2)

    def columns(x, w):
        return jax.shard_map(
            product,
            in_specs=(P(), P(None, "tensor")),
            out_specs=P(None, "tensor"),
            axis_names={"tensor"},
            check_vma=False,
        )(x, w)

    rows = jax.shard_map(
        columns, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    assert model_flops(jax.jit(rows), X, W) == PRODUCT


def test_kernels_say_what_they_cost():
    def kernel(cost):
        def copy(x_ref, y_ref):
            y_ref[...] = x_ref[...]

        return lambda x: pl.pallas_call(copy, out_shape=X, cost_estimate=cost, name="copy")(x)

    assert model_flops(kernel(pl.CostEstimate(flops=11, bytes_accessed=0, transcendentals=0)), X) == 11
    with pytest.raises(ValueError, match="pass cost_estimate="):
        model_flops(kernel(None), X)


def test_a_gpt_by_hand():
    rows, seq, width, depth, vocab = 2, 16, 32, 3, 64
    model = gpt(vocab=vocab, width=width, depth=depth, heads=4, seq=seq)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}
    tokens = rows * seq
    block = 2 * tokens * 12 * width**2 + 2 * 2 * rows * seq**2 * width
    assert model_flops(lambda p, b: model.evaluate(p, b), params, batch) == depth * block + 2 * tokens * width * vocab
