"""Where products of the backward pass run, and which of those that read the same gradient runs first."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("early", [False, True])
def test_a_product_that_is_summed_over_devices_behind_a_loop_runs_behind_the_loop(dtype, early):
    # The sum of an output matrix's gradient stands behind the backward pass of the blocks, or right behind the product.
    mesh = AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def backward(x, dlogits, blocks):
        gradient = jnp.matmul(x.T, dlogits, preferred_element_type=dtype).astype(jnp.float32)
        gradient = lax.psum(gradient, "data") if early else gradient
        dx, _ = lax.scan(lambda dx, block: (jnp.sin(dx @ block), None), dlogits[:, :WIDTH], blocks)
        return lax.psum(dx, "data"), gradient if early else lax.psum(gradient, "data")

    split, whole = (("data",), ()), ((), (), ())
    body = jax.shard_map(backward, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P(), check_vma=False)
    shapes = (4 * ROWS, WIDTH), (4 * ROWS, VOCAB), (2, WIDTH, WIDTH)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments = [(one, "batch", "") for one in (split, split, whole)]
    region = build(jax.make_jaxpr(body)(*args), arguments, {"data": 4})
    live = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    (product,) = [i for i, op in enumerate(live.ops) if op.name == "dot_general"]
    (loop,) = [i for i, op in enumerate(live.ops) if op.name == "scan"]
    assert (product < loop) == early
