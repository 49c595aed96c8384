"""Which of the products that read the same gradient runs first."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.graph import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.roles import temporary_bytes

ROWS, WIDTH, VOCAB = 32, 128, 2048


def backward_products(*, gathered):
    """The shapes of what the products of an output matrix's backward pass make, in the order in which they run."""

    def loss(x, halves):
        matrix = jnp.concatenate([halves, halves], axis=1) if gathered else halves  # as a gather, an array of its own
        return jnp.sum(jnp.sin(x @ matrix))

    args = (
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((WIDTH, VOCAB // 2 if gathered else VOCAB), jnp.float32),
    )
    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args)
    region = build(closed, [(((),) * len(one.shape), "", "") for one in args], {})
    live = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    return [op.outs[0].shard for op in live.ops if op.name == "dot_general" and "transpose" in op.path]


@pytest.mark.parametrize("gathered", [False, True])
def test_the_product_that_is_the_last_to_read_a_gathered_matrix_runs_before_the_one_that_makes_its_gradient(gathered):
    free, gradient = (ROWS, WIDTH), (VOCAB, WIDTH)
    assert backward_products(gathered=gathered) == ([free, gradient] if gathered else [gradient, free])


@pytest.mark.parametrize("summed", [False, True])
def test_on_gpus_the_product_runs_first_that_is_summed_over_devices(summed):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def backward(x, matrix):
        dy = lax.cumsum(x @ matrix)
        dx, gradient = dy @ matrix.T, x.T @ dy
        return dx, lax.psum_scatter(gradient, "data", tiled=True) if summed else gradient

    ins, outs = (jax.P("data"), jax.P()), (jax.P("data"), jax.P("data" if summed else None))
    step = jax.shard_map(backward, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    shapes = (8 * ROWS, WIDTH), (WIDTH, VOCAB)
    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = build(closed, [((("data",), ()), "", ""), (((), ()), "", "")], dict(mesh.shape))
    live = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(region.outputs))
    made = [op.outs[0].shard for op in live.ops if op.name == "dot_general"]
    free, gradient = (ROWS, WIDTH), (WIDTH, VOCAB)
    assert made == [(ROWS, VOCAB), *([gradient, free] if summed else [free, gradient])]
