"""Values that a TPU's compiler keeps on the chip take nothing of the device's memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.cost.hardware import chip
from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.onchip import values_on_chip
from jaxshard.plan.memory.roles import temporary_bytes

MIB = 2**20
SQUARE = jax.ShapeDtypeStruct((512, 512), jnp.float32)  # a MiB
V5E = chip("v5e")


def live(fn, *args, capacity, sums_in_hbm=False, mesh=None):
    """The bytes of temporaries in the device's memory at the fullest moment, with so many bytes on the chip."""
    region = build(jax.make_jaxpr(fn)(*args), [(((),) * len(x.shape), "batch", "") for x in args], dict(mesh or {}))
    step = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    step.keep_on_chip(values_on_chip(step, V5E._replace(vmem_bytes=capacity), sums_in_hbm=sums_in_hbm))
    return step.peak().total


def chain(x, w):
    return jnp.sin(jnp.cos(x @ w) @ w).sum()


@pytest.mark.parametrize(("capacity", "bytes_left"), [(0, MIB), (MIB, 0), (112 * MIB, 0)])
def test_a_value_that_fits_on_the_chip_takes_nothing(capacity, bytes_left):
    assert live(chain, SQUARE, SQUARE, capacity=capacity) // MIB * MIB == bytes_left


def test_two_values_lie_side_by_side_where_both_fit_and_else_the_one_that_is_read_more():
    def pair(x, w):
        first = lax.optimization_barrier(lax.cumsum(x))
        second = lax.optimization_barrier(lax.cumsum(first @ w))
        return lax.cumsum(second + first), lax.cumsum(second * 2)

    sizes = [live(pair, SQUARE, SQUARE, capacity=count * MIB) for count in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[-1]


def test_a_value_that_lies_unread_while_the_chip_could_be_filled_many_times_is_copied_out():
    def loss(turns, x, w):
        kept = jnp.sin(lax.cumsum(x))
        y = lax.scan(lambda y, _: (jnp.cos(y @ w), None), x, None, length=turns)[0]
        return lax.cumsum(y @ lax.cumsum(kept))

    # Five turns are counted, whatever the loop has: what a turn takes decides.
    small, large = SQUARE, jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    assert live(lambda x, w: loss(4, x, w), small, small, capacity=112 * MIB) < 2 * MIB
    assert live(lambda x, w: loss(4, x, w), large, large, capacity=112 * MIB) >= 64 * MIB


@pytest.mark.parametrize(("size", "on_chip"), [(512, True), (2048, False)])
def test_a_copy_of_an_argument_that_lies_unread_for_long_is_not_kept_on_the_chip(size, on_chip):
    def step(table, w):
        return lax.scan(lambda y, _: (y @ w @ w @ w @ w, None), lax.cumsum(table), None, length=4)[0] + table

    args = [jax.ShapeDtypeStruct((size, size), jnp.float32)] * 2
    region = build(jax.make_jaxpr(step)(*args), [(((), ()), "batch", "")] * 2, {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    copy = replace(region.inputs[0], role="")
    found.copies[0].append(copy)
    found.last[copy] = len(found.ops) - 1
    assert (copy in values_on_chip(found, V5E, sums_in_hbm=False)) is on_chip


@pytest.mark.parametrize("sums_in_hbm", [False, True])
def test_what_sparse_cores_sum_lies_in_the_devices_memory(sums_in_hbm):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def add(x):
        return lax.cumsum(lax.psum(lax.cumsum(x), "data"))

    step = jax.shard_map(add, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    found = live(step, SQUARE, capacity=32 * MIB, sums_in_hbm=sums_in_hbm, mesh=mesh.shape)
    assert (found >= MIB) == sums_in_hbm


def test_a_sum_that_runs_beside_other_operations_takes_room_on_the_chip():
    def loss(x, w):
        first = x @ w
        return lax.cumsum(first - lax.pmax(first.max(1), "data")[:, None])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.shard_map(loss, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    found = [live(step, SQUARE, SQUARE, capacity=size * MIB, mesh=mesh.shape) for size in (16, 20)]
    assert found[0] >= MIB > found[1]


def test_two_cores_that_are_one_device_leave_what_products_make_in_its_memory():
    # Each core has an on-chip memory of its own, and makes a part of the product.
    region = build(jax.make_jaxpr(chain)(SQUARE, SQUARE), [(((), ()), "batch", "")] * 2, {})
    step = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    assert values_on_chip(step, V5E, sums_in_hbm=False)
    assert not values_on_chip(step, V5E._replace(cores=2), sums_in_hbm=False)
    assert (chip("v5e").cores, chip("v5p").cores, chip("v5p", num_cores=1).cores) == (1, 2, 1)


@pytest.mark.parametrize("sums_in_hbm", [False, True])
def test_what_the_loops_of_a_step_stack_lies_in_the_devices_memory_where_there_are_sparse_cores(sums_in_hbm):
    def stacked(x, w):
        ys = lax.scan(lambda y, _: (jnp.cos(y @ w), y), x, None, length=2)[1]
        return lax.cumsum(ys, axis=1)

    found = live(stacked, SQUARE, SQUARE, capacity=112 * MIB, sums_in_hbm=sums_in_hbm)
    assert (found >= 2 * MIB) == sums_in_hbm


def test_what_updates_write_into_a_carried_array_is_no_array_of_its_own_on_the_chip():
    # A pipeline writes what arrives into slots that its loop carries: all updates of a turn write into the same memory.
    def step(slots, x):
        def turn(slots, i):
            slots = lax.dynamic_update_index_in_dim(slots, jnp.sin(x), i, 0)
            taken = lax.cumsum(lax.dynamic_index_in_dim(slots, 1 - i, keepdims=False))
            return lax.dynamic_update_index_in_dim(slots, taken, 1 - i, 0), None

        return lax.scan(turn, slots, jnp.arange(2))[0]

    args = (jax.ShapeDtypeStruct((2, 512, 512), jnp.float32), SQUARE)
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "batch", "") for x in args], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    chosen = {one.shard for one in values_on_chip(found, V5E, sums_in_hbm=False)}
    assert (512, 512) in chosen
    assert (2, 512, 512) not in chosen
