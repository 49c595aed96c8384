"""Arrays that lie where donated parameters were, whose parts are cut before all else."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.lent import cut_parts_first, values_in_parameters
from jaxshard.plan.memory.liveness import Liveness

N, BLOCKS = 1024, 4


def liveness_of(*, first):
    """A step over a stack of matrices, whose loops read a copy in bf16, and which adds a part of its gradient."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "data"), ()))

    def loss(w, x):
        def block(x, one):
            return jnp.sin(x @ one.astype(jnp.bfloat16)).astype(jnp.bfloat16), None

        return jax.lax.scan(block, x, w)[0].astype(jnp.float32).sum()

    def step(w, x):
        part = jax.lax.with_sharding_constraint(w, parts)
        read, part = jax.lax.optimization_barrier((w, part)) if first else (w, part)
        gradient = jax.lax.with_sharding_constraint(jnp.sin(jax.grad(loss)(read, x)), parts)
        return jax.lax.with_sharding_constraint(part - 0.1 * gradient, whole)

    shapes = jax.ShapeDtypeStruct((BLOCKS, N, N), jnp.float32), jax.ShapeDtypeStruct((8, N), jnp.bfloat16)
    arguments = [(((), (), ()), "parameters", "w"), (((), ()), "batch", "x")]
    region = build(jax.make_jaxpr(step)(*shapes), arguments, dict(mesh.shape))
    cut_parts_first(region)

    def size(one):
        return math.prod(one.shard) * one.dtype.itemsize

    return Liveness(region, size, set(region.outputs), narrow_products=True)


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_lies_in_the_memory_of_a_parameter_that_loops_have_a_copy_of(first):
    step = liveness_of(first=first)
    found = values_in_parameters(step, set())
    assert [(str(one.dtype), one.shard) for one in found] == ([("float32", (BLOCKS, N, N // 8))] if first else [])
    taken = sum(one.bytes for one in live_at_end(step) if one.value in found)
    step.keep_on_chip(found)
    assert taken == (4 * BLOCKS * N * N // 8 if first else 0)
    assert not any(one.bytes for one in live_at_end(step) if one.value in found)


def live_at_end(step):
    """What is live at the fullest moment, if nothing but the gradient and the part have bytes."""
    step.size = lambda one: 4 * math.prod(one.shard) if one.shard == (BLOCKS, N, N // 8) else 0
    return step.peak().live


def test_what_lives_elsewhere_is_not_placed():
    step = liveness_of(first=True)
    found = values_in_parameters(step, set())
    assert found.isdisjoint(values_in_parameters(step, found))
