"""Gradients that loops behind the backward pass sum part by part, and the copies of which they take slices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.cost.hardware import chip
from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.storage import Storage
from jaxshard.plan.memory.windowed import RELAYOUT, sum_in_windows

N = 64


def graph(loss, shapes, *, cut, whole=False):
    """The graph of a gradient of f32 arrays, the last one a batch over the 8 devices, parameters' gradients cut so."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(*args):
        grads = jax.grad(loss, argnums=tuple(range(len(args) - 1)))(*args)
        specs = [P(), cut] if whole else [cut]
        for spec in specs:
            grads = [lax.with_sharding_constraint(one, NamedSharding(mesh, spec)) for one in grads]
        return grads

    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    arguments = [(((),) * len(shape), "parameters", "w") for shape in shapes[:-1]]
    return build(closed, [*arguments, ((("data",), *((),) * (len(shapes[-1]) - 1)), "batch", "x")], {"data": 8})


def two_products(first, second, x):
    return jnp.sum(jnp.sin(jnp.sin(x @ first) @ second))


def backward(region):
    return [op.outs[0].shape for op in region.ops if op.name == "dot_general" and "transpose" in op.path]


@pytest.mark.parametrize(
    ("devices", "whole", "late"), [(8, False, True), (256, False, False), (8, True, False)], ids=["", "many", "ZeRO-1"]
)
def test_gradients_split_over_all_devices_are_made_behind_the_backward_pass(devices, whole, late):
    region = graph(two_products, [(N, 2 * N), (2 * N, 3 * N), (8 * N, N)], cut=P("data"), whole=whole)
    second, through, first = (3 * N, 2 * N), (8 * N, 2 * N), (2 * N, N)
    assert backward(region) == [second, through, first]
    assert sum_in_windows(region, {"data": devices}) == {}
    assert backward(region) == ([through, first, second] if late else [second, through, first])


@pytest.mark.parametrize(("rows", "folded", "late"), [(1024, True, True), (512, True, False), (512, False, True)])
def test_only_products_that_last_as_long_as_what_is_sent_beside_them_are_summed_in_loops(rows, folded, late):
    # v5e multiplies 985 rows while it sends the result over all links of a torus, of which one ring has half.
    region = graph(two_products, [(N, 2 * N), (2 * N, 3 * N), (8 * rows, N)], cut=P("data"))
    sum_in_windows(region, {"data": 8}, chip=chip("TPU v5e"), folded=frozenset({"data"} if folded else ()))
    assert any(op.name == RELAYOUT for op in region.ops) is late


def test_in_a_loop_over_micro_batches_too():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(first, second, x):
        def turn(total, rows):
            grads = jax.grad(two_products, argnums=(0, 1))(first, second, rows)
            cut = [lax.with_sharding_constraint(one, NamedSharding(mesh, P("data"))) for one in grads]
            return [one + other for one, other in zip(total, cut, strict=True)], None

        return lax.scan(turn, [jnp.zeros(first.shape), jnp.zeros(second.shape)], x)[0]

    shapes = (N, 2 * N), (2 * N, N), (2, 8 * N, N)
    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    whole = ((), ())
    arguments = [(whole, "parameters", "w"), (whole, "parameters", "w"), (((), ("data",), ()), "batch", "x")]
    region = build(closed, arguments, {"data": 8})
    sum_in_windows(region, {"data": 8})
    (body,) = next(op.regions for op in region.ops if op.name == "scan")
    assert sum(op.windowed for op in body.ops) == 2
    assert not any(op.name == RELAYOUT for op in region.ops)


def test_matrix_products_in_such_loops_read_copies_in_bf16():
    region = graph(two_products, [(N, 2 * N), (2 * N, 3 * N), (8 * N, N)], cut=P("data"))
    assert sum_in_windows(region, {"data": 8}) == {}
    copies = [op for op in region.ops if op.name == RELAYOUT]
    assert {(str(op.ins[0].dtype), str(op.outs[0].dtype)) for op in copies} == {("float32", "bfloat16")}
    assert sorted(op.outs[0].shape for op in copies) == [(8 * N, N), (8 * N, 2 * N), (8 * N, 2 * N), (8 * N, 3 * N)]


def convolved(kernel, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return jnp.sum(jnp.sin(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)))


@pytest.mark.parametrize(("rows", "channels", "rows_along_lanes"), [(8, 64, True), (8, 256, False), (32, 256, True)])
def test_a_convolutions_operand_is_copied_to_the_layout_in_which_its_slices_are_smallest(
    rows, channels, rows_along_lanes
):
    # A slice of channels / 8: with the rows along the lanes it has 128 of them for each channel, else 128 channels.
    region = graph(convolved, [(1, 1, channels, 48), (8 * rows, 4, 4, channels)], cut=P(None, None, "data"))
    layouts = sum_in_windows(region, {"data": 8})
    sliced = [layout for copy, layout in layouts.items() if copy.shape[-1] == channels]
    assert sliced == [(0, 3) if rows_along_lanes else (3, 0)]
    copies = [op for op in region.ops if op.name == RELAYOUT]
    assert [str(op.outs[0].dtype) for op in copies] == ["bfloat16", "bfloat16"]  # of both operands
    stored = Storage(region, lambda one: one.shard[0], set(region.outputs), narrow_products=True).stored
    assert all(op.outs[0] in stored for op in copies)


@pytest.mark.parametrize("windowed", [True, False])
def test_what_such_a_loop_reads_is_in_memory(windowed):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w, x):
        grad = jax.grad(lambda w: jnp.sum((jnp.sin(x) @ w).astype(jnp.float32) ** 2))(w)
        return lax.with_sharding_constraint(grad, NamedSharding(mesh, P("data")))

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((N, 2 * N), (8 * N, N)))
    arguments = [(((), ()), "parameters", "w"), ((("data",), ()), "batch", "x")]
    region = build(jax.make_jaxpr(step)(*shapes), arguments, {"data": 8})
    if windowed:
        sum_in_windows(region, {"data": 8})
    (sine,) = (op.outs[0] for op in region.ops if op.name == "sin")
    stored = Storage(region, lambda one: one.shard[0], set(region.outputs), narrow_products=True).stored
    assert (sine in stored) is windowed
