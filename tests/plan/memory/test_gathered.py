"""Gathered weights with more than two dimensions: the layouts that a gather can write."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.gathered import gathered_along, gathered_bytes
from jaxshard.plan.memory.graph import every_op

HEADS, HEAD, ROWS = 4, 64, 8


def step(mesh, *, loop):
    def attend(x, weight):
        whole = jax.lax.all_gather(weight, "data", tiled=True)
        if not loop:
            return jnp.einsum("rd,dhk->rhk", x, whole)
        return jax.lax.scan(lambda x, _: (x + jnp.einsum("rd,dhk->r", x, whole)[:, None], None), x, None, length=2)[0]

    out = P("data")
    return jax.shard_map(attend, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=out, check_vma=False)


def found(width, *, loop=False):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    args = [
        jax.ShapeDtypeStruct((8 * ROWS, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width, HEADS, HEAD), jnp.bfloat16),
    ]
    closed = jax.make_jaxpr(step(mesh, loop=loop))(*args)
    split = [(("data",), ()), (("data",), (), ())]
    region = build(closed, [(one, "parameters", "") for one in split], {"data": 8})
    gathers = [op for op in every_op(region) if op.name == "all_gather"]
    return gathered_along(region), gathers[0].outs[0]


def test_parts_within_a_tile_are_gathered_with_the_head_along_the_lanes():
    along, whole = found(512)
    assert along[whole] == 0
    assert gathered_bytes(whole, 0) == 512 * HEADS * 128 * 2  # a head of 64 fills half of the 128 lanes


@pytest.mark.parametrize(("width", "loop"), [(1024, False), (512, True)])
def test_parts_that_fill_the_lanes_and_what_a_loop_reads_lie_in_the_layout_that_takes_least(width, loop):
    along, whole = found(width, loop=loop)
    assert whole not in along
