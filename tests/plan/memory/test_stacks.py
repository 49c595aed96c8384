"""Gradients and activations that loops stack: whole within a turn, and taken out in slices."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.stacks import slices_of_stacks, sum_beside_products, sum_within_turns

N = 64


def test_a_turn_holds_whole_gradients_until_their_parts_are_stacked():
    # Under js.auto the program has no collective there: XLA sums a block's products over devices and cuts the parts.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(weights, x):
        gathered = lax.with_sharding_constraint(weights, NamedSharding(mesh, P()))
        grads = jax.grad(lambda w: jnp.sum(lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0]))(gathered)
        return lax.with_sharding_constraint(grads, NamedSharding(mesh, P(None, "data")))

    shapes = ((3, N, N), (8 * N, N))
    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    splits = [((), ("data",), ()), (("data",), ())]
    region = build(
        closed, [(one, role, "x") for one, role in zip(splits, ("parameters", "batch"), strict=True)], {"data": 8}
    )
    sum_within_turns(region)
    (body,) = [op for op in region.ops if op.name == "scan"][-1].regions
    product, summed = (
        next(op for op in body.ops if op.name == name and op.outs[0].shard == (N, N))
        for name in ("dot_general", "psum")
    )
    assert summed.ins == product.outs
    assert body.outputs[-1].shard == (N // 8, N)
    found = Liveness(region, lambda one: 4 * math.prod(one.shard), set(region.outputs), narrow_products=True)
    (inside,) = found.inner[next(op for op in reversed(found.ops) if op.regions)]
    assert inside.last[summed.outs[0]] >= max(inside.place[op] for op in body.ops if op.name == "dot_general")


@pytest.mark.parametrize("shared", [True, False])
def test_a_slice_that_several_operations_read_lies_beside_its_stack(shared):
    # Of what the forward loop stacks, the backward loop reads a slice once for the weights' gradient, or twice.
    def step(weights, x):
        def turn(h, w):
            kept = checkpoint_name(h @ w, "kept")
            return (jnp.sin(kept) * (kept @ w) if shared else kept), None

        body = jax.checkpoint(turn, policy=jax.checkpoint_policies.save_only_these_names("kept"), prevent_cse=False)
        return jax.grad(lambda w: jnp.sum(lax.scan(body, x, w)[0]))(weights)

    args = (jax.ShapeDtypeStruct((3, N, N), jnp.float32), jax.ShapeDtypeStruct((N, N), jnp.float32))
    region = build(jax.make_jaxpr(step)(*args), [(((),) * 3, "batch", "w"), (((),) * 2, "batch", "x")], {})
    found = Liveness(region, lambda one: 4 * math.prod(one.shard), set(region.outputs), narrow_products=True)
    loop = next(op for op in reversed(found.ops) if op.name == "scan")
    (body,) = found.inner[loop]
    assert list(slices_of_stacks(loop, found.makers, found.find))
    taken = [one for found in body.copies.values() for one in found]
    assert bool(taken) == shared
    assert all(one.shard == (N, N) for one in taken)


@pytest.mark.parametrize("read_again", [True, False])
def test_a_sum_of_a_turn_begins_before_the_products_that_read_the_same(read_again):
    # The gradient of a part of an output matrix, and that of what is multiplied by it, which read the logits' gradient.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(matrix, x):
        def turn(total, logits):
            back = logits @ matrix if read_again else x
            part = lax.with_sharding_constraint(
                jnp.einsum("rn,rm->nm", logits, x), NamedSharding(mesh, P(None, "data"))
            )
            return total + part, back

        return lax.scan(turn, jnp.zeros((N, N)), jnp.ones((3, 8 * N, N)) * x)

    args = (jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((8 * N, N), jnp.float32))
    splits = [(((), ()), "parameters", "w"), ((("data",), ()), "batch", "x")]
    region = build(jax.make_jaxpr(step)(*args), splits, {"data": 8})
    sum_beside_products(region)
    (body,) = next(op for op in region.ops if op.name == "scan").regions
    names = [op.name for op in body.ops if op.name in ("dot_general", "psum", "sharding_constraint")]
    overlapped = ["dot_general", "psum", "dot_general", "sharding_constraint"]
    assert names == (overlapped if read_again else ["dot_general", "sharding_constraint"])
