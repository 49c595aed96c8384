"""What is stored on GPUs beyond TPUs, and splits of windows."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.plan.memory.graph import build
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
