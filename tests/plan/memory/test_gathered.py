"""Gathered weights with more than two dimensions: the layouts that a gather can write."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.gathered import gathered_along, gathered_bytes
from jaxshard.plan.memory.graph import build, every_op
from jaxshard.plan.memory.liveness import Liveness

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


@pytest.mark.parametrize(
    ("spec", "width", "beside"), [(("data",), 80, 0), ((None, "data"), 512, 1), ((None, "data"), 80, 2.6)]
)
def test_parts_of_a_result_that_are_put_in_order_are_gathered_into_an_array_of_their_own(spec, width, beside):
    # Over 8 devices parts are 64 wide, which fills tiles of 8, or 10 wide: those are joined from parts padded to 16.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts, whole = (NamedSharding(mesh, P(*axes)) for axes in (spec, ()))

    def step(w):
        return jax.lax.with_sharding_constraint(2.0 * jax.lax.with_sharding_constraint(w, parts), whole)

    closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((128, width), jnp.float32))
    region = build(closed, [(((), ()), "parameters", "w")], dict(mesh.shape))
    live = Liveness(region, lambda one: 4 * math.prod(one.shard), set(region.outputs), narrow_products=True).peak().live
    assert sum(one.bytes for one in live if one.note == "copy") == beside * 4 * 128 * width
