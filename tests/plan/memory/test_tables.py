"""The layout of the sums of tables' gradients over micro-batches."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.tables import tables_by_rows

ROWS, WIDTH = 1000, 64


@pytest.mark.parametrize("looked_up", [True, False])
def test_parts_of_a_gradient_that_rows_are_added_to_are_summed_with_columns_along_the_lanes(looked_up):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(tokens, rows):
        def turn(total, one):
            gradient = (
                jnp.zeros((ROWS, WIDTH)).at[tokens].add(one) if looked_up else jax.nn.one_hot(tokens, ROWS).T @ one
            )
            return total + lax.with_sharding_constraint(gradient, NamedSharding(mesh, P(None, "data"))), None

        return lax.scan(turn, jnp.zeros((ROWS, WIDTH)), rows)[0]

    args = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((2, 16, WIDTH), jnp.float32)
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "batch", "x") for x in args], {"data": 8})
    (loop,) = (op for op in region.ops if op.name == "scan")
    found = tables_by_rows(region)
    assert (loop.outs[0] in found) == looked_up
    assert {one.shard for one in found} == ({(ROWS, WIDTH // 8)} if looked_up else set())
    assert set(found.values()) <= {(1, 0)}
