"""Zeros that loops write into, beside what else reads the same zeros, as XLA for GPUs stores them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.roles import temporary_bytes
from jaxshard.plan.memory.zeros import ZEROS, share_zeros, zeros_before

N, TURNS = 16, 4
STACK = 4 * TURNS * N * N


def region_of(fn, *shapes):
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return build(closed, [(((),) * len(shape), "parameters", "") for shape in shapes], {})


def update(weights, x, otherwise):
    stack = lax.scan(lambda h, w: (jnp.sin(h @ w), h @ w), x, weights)[1]
    return jnp.where(jnp.isfinite(weights), lax.cumsum(stack, axis=1), otherwise)


@pytest.mark.parametrize(("otherwise", "arrays"), [(0.0, 1), (jnp.nan, 0)])
def test_zeros_of_a_choice_live_from_the_loop_that_stacks_such_an_array(otherwise, arrays):
    region = region_of(functools.partial(update, otherwise=otherwise), (TURNS, N, N), (N, N))
    share_zeros(region)
    zeros = [op for op in region.ops if op.name == ZEROS]
    assert len(zeros) == arrays
    live = Liveness(region, functools.partial(temporary_bytes, tiled=False), set(region.outputs))
    assert [live.last[op.outs[0]] for op in zeros] == [len(live.ops) - 1] * arrays
    assert sum(one.value in zeros[0].outs for one in live.peak().live for _ in zeros) == arrays


def test_zeros_of_another_shape_are_computed_where_they_are_read():
    def choice(weights, x):
        return jnp.where(jnp.isfinite(x), lax.scan(lambda h, w: (jnp.sin(h @ w), h @ w), x, weights)[0], 0.0)

    region = region_of(choice, (TURNS, N, N), (N, N))
    share_zeros(region)
    assert not any(op.name == ZEROS for op in region.ops)


def test_sums_of_micro_batches_begin_with_zeros_that_the_update_reads():
    def step(weights, rows):
        total = lax.scan(lambda sum, x: (sum + lax.cumsum(x @ weights), None), jnp.zeros((N, N)), rows)[0]
        return jnp.where(jnp.isfinite(weights), total, 0.0)

    region = region_of(step, (N, N), (TURNS, N, N))
    share_zeros(region)
    assert zeros_before(region.ops, len(region.ops)) > 1  # behind the loop
    kinds = [(op.name, op.outs[0].shape) for op in region.ops if op.name in (ZEROS, "scan")]
    assert kinds == [(ZEROS, (N, N)), ("scan", (N, N))]


def test_a_stack_lies_in_memory_from_the_loop_before_on_gpus():
    def loops(weights, x):
        h = lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)[0]
        start = lax.cumsum(h @ x)
        return lax.scan(lambda h, w: (jnp.sin(h @ w), h @ w), start, weights)[1].sum()

    found = {}
    for tpu in (False, True):
        live = Liveness(
            region_of(loops, (TURNS, N, N), (N, N)), functools.partial(temporary_bytes, tiled=False), set(),
            narrow_products=tpu,
        )  # fmt: skip
        found[tpu] = live._begun()
    assert found[True] == {}
    first, second = (sum(one.bytes for one in stacks.values()) for stacks in found[False].values())
    assert (first, second) == (0, STACK)


@pytest.mark.parametrize("product", [False, True])
def test_zeros_are_made_beside_the_first_gather_if_no_product_leads_to_the_loop(product):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(weights, x):
        h = lax.scan(lambda h, w: (jnp.sin(h @ w), None), lax.all_gather(x, "data", tiled=True), weights)[0]
        return lax.scan(lambda h, w: (jnp.sin(h @ w), h @ w), h @ h if product else h, weights)[1]

    ins = jax.P(), jax.P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=jax.P(), check_vma=False)
    closed = jax.make_jaxpr(mapped)(jnp.zeros((TURNS, N, N)), jnp.zeros((N, N)))
    region = build(closed, [(((),) * 3, "", ""), ((("data",), ()), "", "")], dict(mesh.shape))
    first, second = (i for i, op in enumerate(region.ops) if op.name == "scan")
    place = zeros_before(region.ops, second)
    assert place == first + 1 if product else region.ops[place].name == "all_gather"


@pytest.mark.parametrize(("axis", "arrays"), [(0, 1), (1, 0)])
def test_what_is_gathered_along_its_columns_is_updated_with_zeros_of_its_own(axis, arrays):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(weights, rows):
        total = lax.scan(lambda sum, x: (sum + x, None), jnp.zeros(weights.shape), rows)[0]
        return lax.all_gather(jnp.where(jnp.isfinite(weights), total, 0.0), "data", axis=axis, tiled=True)

    parts = jax.P("data") if axis == 0 else jax.P(None, "data")
    ins = parts, jax.P(None, *parts)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=jax.P(), check_vma=False)
    shapes = (8 * N, 8 * N), (TURNS, 8 * N, 8 * N)
    closed = jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    splits = [(("data",), ()) if axis == 0 else ((), ("data",))] * 2
    region = build(closed, [(splits[0], "", ""), (((), *splits[1]), "", "")], dict(mesh.shape))
    share_zeros(region)
    assert sum(op.name == ZEROS for op in region.ops) == arrays
