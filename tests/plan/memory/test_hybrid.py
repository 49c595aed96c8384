"""Which products wait for the sums of hybrid sharding behind the backward pass, and which sums do not wait."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.hybrid import scatter_early, sums_stacks_twice
from jaxshard.plan.memory.liveness import Liveness

N = 64


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_gradient_waits_for_the_sums_of_hybrid_sharding_behind_the_backward_pass(hybrid):
    # XLA for TPUs runs the gradient of an output matrix beside the first of these sums; logits live till then.
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(weights, head, x):
        def loss(weights, head):
            h = lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)[0]
            return jnp.sum(jnp.sin(h @ head))

        blocks, last = jax.grad(loss, argnums=(0, 1))(weights, head)
        blocks = lax.psum_scatter(lax.optimization_barrier(blocks), "data", scatter_dimension=1, tiled=True)
        return lax.psum(blocks, "replica") if hybrid else blocks, 2 * last

    shapes = ((3, N, N), (N, 4 * N), (N, N))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=(P(None, "data"), P()), check_vma=False)
    closed = jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = build(closed, [(((),) * len(shape), "parameters", "x") for shape in shapes], dict(mesh.shape))
    assert sums_stacks_twice(region) == hybrid
    found = Liveness(region, lambda one: 4 * math.prod(one.shard), set(), narrow_products=True)
    loop = next(op for op in reversed(found.ops) if op.name == "scan")
    products = [op for op in found.ops if op.name == "dot_general"]
    gradient = next(op for op in reversed(products) if sorted(op.outs[0].shard) == [N, 4 * N])
    assert (found.place[gradient] > found.place[loop]) == hybrid


def order(step, *shapes, hybrid=True, beside=False):
    """The products and sums of a step in order, and what else makes its gradients, each with the rows that it makes."""
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def summed(*args):
        parts = [lax.psum_scatter(lax.optimization_barrier(one), "data", tiled=True) for one in step(*args)]
        return [lax.psum(one, "replica") for one in parts] if hybrid else parts

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    closed = jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = build(closed, [(((),) * len(shape), "batch", "x") for shape in shapes], dict(mesh.shape))
    scatter_early(region, beside=beside)
    found = Liveness(region, lambda one: 4 * math.prod(one.shard), set(), narrow_products=True)
    names = {"dot_general": "product", "cumsum": "sum of rows", "reduce_scatter": "scatter"}
    return [(names[op.name], op.outs[0].shard[0]) for op in found.ops if op.name in names]


def two_gradients(x, w, v):
    h = jnp.tanh(x @ w)
    return x.T @ h, (h @ v).T @ h


@pytest.mark.parametrize(("rows", "hybrid", "waits"), [(8, True, True), (4 * N, True, False), (8, False, False)])
def test_a_gradient_that_is_larger_than_its_operands_waits_for_the_first_sum_of_hybrid_sharding(rows, hybrid, waits):
    found = order(two_gradients, (rows, N), (N, N), (N, 2 * N), hybrid=hybrid)
    assert found[-2:] == [("scatter", N // 4), ("scatter", N // 2)]
    made = [("product", rows), ("product", N), ("product", rows), ("product", 2 * N)]
    assert found[:-2] == (sorted(made, key=lambda one: one[1] != rows) if waits else made)


@pytest.mark.parametrize(("rows", "beside", "early"), [(40, False, True), (96, False, False), (96, True, True)])
def test_a_matrix_is_scattered_as_soon_as_it_is_there_in_odd_parts_or_by_sparse_cores(rows, beside, early):
    def step(table, *args):
        return jnp.cumsum(table, axis=0), *two_gradients(*args)

    found = order(step, (rows, N), (8, N), (N, N), (N, 2 * N), beside=beside)
    assert (found.index(("scatter", rows // 4)) == found.index(("sum of rows", rows)) + 1) == early


def test_a_gradient_that_is_converted_waits_too():
    def step(*args):
        return [one.astype(jnp.bfloat16) for one in two_gradients(*args)]

    found = order(step, (8, N), (N, N), (N, 2 * N))
    assert [name for name, rows in found if rows != 8] == ["product", "product", "scatter", "scatter"]
    assert found[:2] == [("product", 8)] * 2
