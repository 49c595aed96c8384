"""Casts to a wider type and back, and parts that are cut from widened sums, on GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.casts import cancel_casts
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.memory.storage import Storage

N = 16


def region_of(fn, dtype):
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((N, N), dtype))
    return build(closed, [(((), ()), "parameters", "")], {})


@pytest.mark.parametrize(
    ("dtype", "between", "casts"),
    [(jnp.bfloat16, jnp.float32, 1), (jnp.float32, jnp.bfloat16, 2), (jnp.bfloat16, jnp.float16, 2)],
)
def test_casts_to_a_wider_type_and_back_are_dropped(dtype, between, casts):
    region = region_of(lambda x: lax.cumsum((x @ x).astype(between).astype(dtype)), dtype)
    assert [op.name for op in region.ops].count("convert_element_type") == 2
    cancel_casts(region)
    found = [op for op in region.ops if op.name == "convert_element_type"]
    assert len(found) == casts
    assert casts == 2 or found[0].ins[0].dtype == found[0].outs[0].dtype  # the product's own result: the same memory


@pytest.mark.parametrize(("maker", "part", "stored"), [("psum", 2, False), ("psum", N, True), ("dot_general", 2, True)])
def test_a_part_of_a_widened_sum_is_cut_from_the_sum(maker, part, stored):
    def value(dtype, rows=N, role=""):
        return Value((N, N), jnp.dtype(dtype), ((), ()), (rows, N), role)

    given, summed, wide, cut = (
        value("bfloat16", role="batch"),
        value("bfloat16"),
        value("float32"),
        value("float32", part),
    )
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    ops = [
        Op(maker, [given] if maker == "psum" else [given, given], [summed], params=numbers),
        Op("convert_element_type", [summed], [wide]),
        Op("sharding_constraint", [wide], [cut]),
    ]
    region = Region([given], ops, [cut])
    step = Storage(region, lambda one: one.shard[0] * N * one.dtype.itemsize, {cut}, narrow_products=False)
    assert (wide in step.stored) == stored


@pytest.mark.parametrize(("rows", "types"), [((), ("bfloat16", "float32")), (("data",), None)])
def test_a_product_that_is_summed_over_devices_is_widened_behind_the_sum(rows, types):
    closed = jax.make_jaxpr(lambda x, y: lax.cumsum((x.T @ y).astype(jnp.float32)))(
        *[jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * 2
    )
    region = build(closed, [((rows, ()), "batch", "")] * 2, {"data": 8})
    step = Storage(region, lambda one: N * N * one.dtype.itemsize, set(region.outputs), narrow_products=False)
    (product,) = step.products
    found = step.widened(product)
    assert (found and tuple(map(str, found))) == types
