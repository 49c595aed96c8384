"""What is stored on GPUs beyond TPUs, and splits of windows."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.shards import propagate

N = 256


def live_bytes(function, *shapes, tpu):
    """Bytes live at the fullest moment of a function of f32 arrays, beside its arguments."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    arguments = [(((),) * len(shape), "parameters", "x") for shape in shapes]
    region = build(closed, arguments, {})

    def size(value):
        total = 4
        for extent in value.shard:
            total *= extent
        return total

    return Liveness(region, size, set(), narrow_products=tpu).peak().total


def test_the_operand_of_a_product_is_stored_on_gpus_and_computed_where_it_is_read_on_tpus():
    def exponentials(x, w):
        return (jnp.exp(x) @ w).sum()

    shapes = (N, N), (N, 8)
    assert live_bytes(exponentials, *shapes, tpu=False) >= 4 * N * N
    assert live_bytes(exponentials, *shapes, tpu=True) < 4 * N * N


def test_a_window_keeps_the_split_of_rows():
    rows = (("data",), (), (), ())
    assert propagate("reduce_window_max", {}, [(rows, (16, 8, 8, 4))], (16, 4, 4, 4))[0] == ("data",)


def test_a_product_whose_result_is_read_after_a_loop_runs_after_it():
    # XLA for GPUs schedules the gradient of an output matrix beside the all-reduces behind the backward pass.
    def loss(w, head, x):
        h = lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, length=3)[0]
        return jnp.sum(jnp.sin(h @ head))

    shapes = ((N, N), (N, 4 * N), (N, N))
    closed = jax.make_jaxpr(lambda *args: [2 * one for one in jax.grad(loss, argnums=(0, 1))(*args)])(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    region = build(closed, [(((),) * 2, "parameters", "x") for _ in shapes], {})
    places = {}
    for tpu in (False, True):
        found = Liveness(region, lambda value: 4 * math.prod(value.shard), set(), narrow_products=tpu)
        backward = [op for op in found.ops if "transpose" in op.path]
        loop = next(op for op in backward if op.name == "scan")
        (gradient,) = (op for op in backward if op.name == "dot_general" and 4 * N in op.outs[0].shard)
        places[tpu] = found.place[gradient] > found.place[loop]
    assert places == {False: True, True: False}


def stored_shapes(function, *shapes):
    """What a GPU stores of a function's elementwise results, and as what."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    region = build(closed, [(((),) * len(shape), "batch", "x") for shape in shapes], {})
    live = Liveness(region, lambda value: 4 * math.prod(value.shard), set())
    found = [
        (op.name, str(op.outs[0].dtype)) for op in live.ops if live.is_elementwise(op) and op.outs[0] in live.stored
    ]
    return live, found


def test_a_gpu_stores_a_narrow_sum_and_not_what_is_computed_of_it():
    def layer(x, y, z):
        total = (x + y + z).astype(jnp.bfloat16)
        wide = total.astype(jnp.float32)
        centered = wide - wide.mean(axis=-1, keepdims=True)
        return lax.cumsum(centered * 2), lax.cumsum(centered * 3), lax.cumsum(wide), lax.cumsum(total)

    _, found = stored_shapes(layer, (N, N), (N, N), (N, N))
    assert [dtype for name, dtype in found if name != "mul"] == ["bfloat16", "float32"]  # what a sum reads in order


def test_a_gpu_computes_a_hyperbolic_tangent_once():
    def gelu(x):
        t = jnp.tanh(x)
        return lax.cumsum(x * t), lax.cumsum(1 - t * t)

    assert ("tanh", "float32") in stored_shapes(gelu, (N, N))[1]


@pytest.mark.parametrize("summed", [False, True])
def test_a_gpu_does_not_write_over_what_it_reads_again_behind_its_sums(summed):
    def rows(x):
        p = x @ x
        return (p - (p.sum(axis=-1, keepdims=True) if summed else 1)) @ x

    live, _ = stored_shapes(rows, (N, N))
    at, op = next((i, op) for i, op in enumerate(live.ops) if op.name == "sub")
    assert (live._overwritten(op, 0, at, set()) is None) == summed
