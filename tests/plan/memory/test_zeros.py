"""Zeros that loops write into, beside what else reads the same zeros, as XLA for GPUs stores them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.graph import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.roles import temporary_bytes
from jaxshard.plan.memory.zeros import ZEROS, share_zeros

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
