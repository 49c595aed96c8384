"""Scatters of micro-batches' gradients that run once behind the loop."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.accumulated import scatter_behind_loops
from jaxshard.plan.memory.build import build

N = 64


def _scattered(grad, axis):
    return lax.psum_scatter(grad, axis, scatter_dimension=0, tiled=True)


@pytest.mark.parametrize(
    ("summed", "carried", "behind"),
    [
        (lambda grad: _scattered(grad, "data"), (N, N), 1),
        (lambda grad: _scattered(grad.astype(jnp.bfloat16), "data").astype(grad.dtype), (N, N), 1),
        # Of two only the one whose result is added; a sum over replicas between keeps it where it is.
        (lambda grad: _scattered(_scattered(grad, "data"), "replica"), (N // 4, N), 1),
        (lambda grad: lax.psum(_scattered(grad, "data"), "replica"), (N // 4, N), 0),
        (lambda grad: jnp.tanh(_scattered(grad, "data")), (N // 4, N), 0),
    ],
)
def test_what_a_loop_only_adds_up_is_scattered_behind_it(summed, carried, behind):
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(weights, rows):
        part = jax.eval_shape(summed, weights)

        def turn(total, x):
            return total + summed(jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(weights)), None

        return 2 * lax.scan(turn, jnp.zeros(part.shape, part.dtype), rows)[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(("data", "replica")), check_vma=False)
    args = (jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((3, 8, N), jnp.float32))
    closed = jax.make_jaxpr(mapped)(*args)
    region = build(closed, [(((),) * len(one.shape), "parameters", "x") for one in args], dict(mesh.shape))
    scatter_behind_loops(region)
    (loop,) = (op for op in region.ops if op.name == "scan")
    (body,) = loop.regions
    consts = loop.counts[0]
    assert loop.ins[consts].shard == body.inputs[consts].shard == body.outputs[0].shard == loop.outs[0].shard == carried
    found = [op for op in region.ops if op.name in ("reduce_scatter", "psum_scatter")]
    assert len(found) == behind
    assert all(op.ins == [loop.outs[0]] and op.ins[0].dtype == jnp.float32 for op in found)


@pytest.mark.parametrize(("split", "carried"), [(("tensor", None), (N, N)), ((None, "tensor"), (N // 4, N))])
def test_what_is_gathered_along_another_dimension_is_scattered_before_that_in_each_turn(split, carried):
    # Where the loop adds whole gradients, all of them would be gathered over the tensor axis.
    mesh = jax.make_mesh((2, 4), ("tensor", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(weights, rows):
        whole = jax.shard_map(
            lambda grad: _scattered(grad, "data"), in_specs=P(), out_specs=P(), axis_names={"tensor"}, check_vma=False
        )

        def turn(total, x):
            return total + whole(weights * jnp.sum(x)), None

        return lax.scan(turn, jnp.zeros((N // 4, N)), rows)[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P("data"), axis_names={"data"}, check_vma=False)
    args = (jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((3, 8, N), jnp.float32))
    entries = tuple(() if axis is None else (axis,) for axis in split)
    closed = jax.make_jaxpr(jax.jit(mapped))(*args)
    region = build(closed, [(entries, "parameters", "x"), (((),) * 3, "batch", "y")], dict(mesh.shape))
    scatter_behind_loops(region)
    (loop,) = (op for op in region.ops if op.name == "scan")
    assert loop.outs[0].shard == carried
