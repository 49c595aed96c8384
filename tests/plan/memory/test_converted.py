"""The types in which TPU programs store what loops carry and stack, where all that reads it wants a narrower one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.roles import temporary_bytes
from jaxshard.plan.memory.storage import narrower

TURNS, ROWS, WIDTH = 4, 256, 128
SLICE = ROWS * WIDTH


def loops(fn, *shapes):
    """When the values of a program of f32 arrays live, and its loops in order."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = build(closed, [(((),) * len(shape), "batch", "") for shape in shapes], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    return found, [op for op in found.ops if op.name == "scan"]


@pytest.mark.parametrize("read", ["multiplied", "multiplied in a loop", "added"])
def test_slots_that_a_loop_writes_and_multiplies_are_carried_in_bf16(read):
    # So a pipeline keeps what a stage's backward pass reads: it writes one slot, or leaves it, and reads another one.
    def step(x, w):
        def turn(carry, i):
            slots, total = carry
            old = lax.dynamic_index_in_dim(slots, i, keepdims=False)
            new = jnp.where(i > 1, old, jnp.sin(x + total))
            slots = lax.dynamic_update_index_in_dim(slots, new, i, 0)

            def backward(slots):
                kept = lax.dynamic_index_in_dim(slots, i // 2, keepdims=False)
                if read == "multiplied in a loop":
                    return lax.scan(lambda h, row: (h + kept @ row, None), jnp.zeros((ROWS, WIDTH)), w)[0]
                return kept @ w[0] if read == "multiplied" else kept

            return (slots, total + lax.cond(i > 2, backward, lambda slots: total, slots)), None

        begin = jnp.zeros((TURNS, ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH))
        return lax.scan(turn, begin, jnp.arange(TURNS))[0][1]

    found, (loop,) = loops(step, (ROWS, WIDTH), (TURNS, WIDTH, WIDTH))
    begin = next(one for one in loop.ins if one.shape == (TURNS, ROWS, WIDTH))
    slots = next(one for one in loop.outs if one.shape == (TURNS, ROWS, WIDTH))
    wide = 1 if read == "added" else 0
    assert [found.stored_bytes(found.find(one)) for one in (begin, slots)] == [(2 + 2 * wide) * TURNS * SLICE] * 2
    (body,) = found.inner[loop]
    branches = [branch for op in body.ops if op.name == "cond" for branch in body.inner[op]]
    copies = [one for branch in (body, *branches) for found in branch.copies.values() for one in found]
    assert not [one for one in copies if one.shape == (TURNS, ROWS, WIDTH)]


@pytest.mark.parametrize(("product", "dtype"), [("rn,rn->r", None), ("rn,mn->rm", "bfloat16"), ("rn,r->n", "bfloat16")])
def test_rows_that_are_multiplied_with_rows_are_no_work_for_a_matrix_unit_and_stay_f32(product, dtype):
    second = {"rn": (ROWS, WIDTH), "mn": (ROWS, WIDTH), "r": (ROWS,)}[product[3:].split("->")[0]]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), second)]
    closed = jax.make_jaxpr(lambda x, y: jnp.einsum(product, x, y))(*args)
    region = build(closed, [(((),) * len(x.shape), "batch", "") for x in args], {})
    op = next(op for op in region.ops if op.name == "dot_general")
    assert narrower(op, op.ins[0], products=True) == dtype


def test_what_is_multiplied_in_another_form_is_stacked_in_bf16():
    # As attention's output is, by heads, of which the projection's gradient reads rows.
    heads = (ROWS, 2, WIDTH // 2)

    def step(weights, x):
        def turn(h, w):
            kept = checkpoint_name(jnp.sin(h).reshape(heads), "kept")
            return h + kept.reshape(ROWS, WIDTH) @ w, None

        body = jax.checkpoint(turn, policy=jax.checkpoint_policies.save_only_these_names("kept"), prevent_cse=False)
        return jax.grad(lambda w: jnp.sum(lax.scan(body, x, w)[0]))(weights)

    found, (forward, _) = loops(step, (TURNS, WIDTH, WIDTH), (ROWS, WIDTH))
    (stack,) = [one for one in forward.outs if one.shape == (TURNS, *heads)]
    assert str(found.stored_as[stack]) == "bfloat16"


def test_a_weight_that_is_narrowed_and_widened_again_is_bf16_in_a_gpus_memory():
    def step(x, w, scale):
        again = (w * scale).astype(jnp.bfloat16).astype(jnp.float32)
        return lax.cumsum(x @ again) + lax.cumsum(lax.cumsum(x) @ again)

    closed = jax.make_jaxpr(step)(*[jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)] * 3)
    region = build(closed, [(((), ()), "batch", "")] * 3, {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(region.outputs))
    *_, last = (op.outs[0] for op in region.ops if op.name == "convert_element_type")
    assert found.stored_bytes(last) == 2 * ROWS * ROWS


@pytest.mark.parametrize("tpu", [True, False])
def test_what_a_loop_converts_is_copied_before_it_on_tpus_and_a_slice_at_a_time_on_gpus(tpu):
    def loop(weights, x):
        def turn(h, w):
            return jnp.sin(h @ w.astype(jnp.bfloat16)), None

        return lax.scan(turn, x, weights)[0]

    shapes = jax.ShapeDtypeStruct((TURNS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    region = build(jax.make_jaxpr(loop)(*shapes), [(((),) * len(x.shape), "parameters", "") for x in shapes], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(region.outputs), narrow_products=tpu)
    copied = [one.bytes for one in found.peak().live if one.note == "converted"]
    assert copied == ([2 * TURNS * WIDTH * WIDTH] if tpu else [])
