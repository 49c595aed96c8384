"""Results that are gathered into arrays of their own before they are written over arguments."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.donated import gathered_apart
from jaxshard.plan.memory.liveness import Liveness

N = 64


@pytest.mark.parametrize("spec", [("data",), (None, "data")])
@pytest.mark.parametrize("measured", [True, False])
def test_a_parameter_that_its_update_is_measured_against_is_gathered_apart(spec, measured):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (spec, ()))

    def step(w):
        part = jax.lax.with_sharding_constraint(w, parts)
        new = part - 0.1 * jnp.sin(part)
        norm = jnp.sum((new - part) ** 2) if measured else jnp.zeros(())
        return jax.lax.with_sharding_constraint(new, whole), norm

    closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((N, N), jnp.float32))
    region = build(closed, [(((), ()), "parameters", "w")], dict(mesh.shape))
    assert gathered_apart(region) == ({region.outputs[0]} if measured else set())


@pytest.mark.parametrize(
    ("spec", "width", "beside"), [(("data",), 80, 0), ((None, "data"), 512, 1), ((None, "data"), 80, 2.6)]
)
def test_parts_of_a_result_that_are_put_in_order_are_gathered_into_an_array_of_their_own(spec, width, beside):
    # Over 8 devices parts are 64 wide, which fills tiles of 8, or 10 wide: those are joined from parts padded to 16.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (spec, ()))

    def step(w):
        return jax.lax.with_sharding_constraint(1.1 * jax.lax.with_sharding_constraint(w, parts), whole)

    closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((128, width), jnp.float32))
    region = build(closed, [(((), ()), "parameters", "w")], dict(mesh.shape))
    live = Liveness(region, lambda one: 4 * math.prod(one.shard), set(region.outputs), narrow_products=True).peak().live
    assert sum(one.bytes for one in live if one.note == "copy") == beside * 4 * 128 * width


@pytest.mark.parametrize(("rows", "beside"), [(128, [1]), (40, [1, 1.6])])
def test_a_result_whose_update_is_measured_is_gathered_into_an_array_of_its_own(rows, beside):
    # Parts of 16 rows lie one behind the other in tiles of 8; those of 5 rows are padded to 8, and joined from there.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def step(w):
        part = jax.lax.with_sharding_constraint(w, parts)
        new = part - 0.1 * jnp.sin(part)
        return jax.lax.with_sharding_constraint(new, whole), jnp.sum((new - part) ** 2)

    closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((rows, 128), jnp.float32))
    region = build(closed, [(((), ()), "parameters", "w")], dict(mesh.shape))
    live = Liveness(region, lambda one: 4 * math.prod(one.shard), set(region.outputs), narrow_products=True).peak().live
    assert [one.bytes for one in live if one.note == "copy"] == [size * 4 * rows * 128 for size in beside]
