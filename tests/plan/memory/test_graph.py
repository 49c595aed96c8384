"""The graph of a step: the part of every value that one device holds, and what compilers leave out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.graph import build, every_op
from jaxshard.plan.memory.shards import propagate, spec_split


def test_splits_follow_products_reductions_and_windows():
    rows, columns = (("data",), ()), ((), ("tensor",))
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    assert propagate("dot_general", numbers, [(rows, (8, 4)), (columns, (4, 6))], (8, 6)) == (("data",), ("tensor",))
    assert propagate("reduce_sum", {"axes": (0,)}, [(columns, (4, 6))], (6,)) == (("tensor",),)
    assert propagate("mul", {}, [(rows, (8, 4)), (columns, (1, 4))], (8, 4)) == (("data",), ("tensor",))
    images = (("data",), (), (), ())
    assert propagate("reduce_window_max", {}, [(images, (16, 8, 8, 4))], (16, 4, 4, 4))[0] == ("data",)
    assert spec_split(P(("data", "tensor")), 2, frozenset({"data"})) == (("data",), ())


def test_a_broadcast_is_split_along_the_dimension_that_it_adds_where_a_shard_map_takes_one_copy_each():
    # The derivative of a sum over the parts of devices: each of them needs the one copy that is its own.
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False)

    def shards(shape, dims):
        closed = jax.make_jaxpr(lambda x: each(jax.lax.broadcast_in_dim(x * 1, (8, 16), dims)))(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        region = build(closed, [(((),), "", "x")], dict(mesh.shape))
        return [op.outs[0].shard for op in region.ops if op.name == "broadcast_in_dim"]

    assert shards((16,), (1,)) == [(1, 16)]
    assert shards((8,), (0,)) == [(8, 16)]  # its operand is whole, and a split would be one of it too


def test_a_gradient_is_split_as_the_sum_over_micro_batches_to_which_it_is_added():
    # The gradient of a table is a scatter into zeros, which have no sharding.
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, P("tensor"))

    def step(tokens, updates):
        start = jax.lax.with_sharding_constraint(jnp.zeros((64, 16)), split)

        def turn(total, one):
            return total + jnp.zeros((64, 16)).at[one[0]].add(one[1]), None

        return jax.lax.scan(turn, start, (tokens, updates))[0]

    args = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "", "") for x in args], dict(mesh.shape))
    (loop,) = (op for op in region.ops if op.name == "scan")
    assert [op.outs[0].shard for op in loop.regions[0].ops if op.name.startswith("scatter")] == [(8, 16)]


def test_zeros_that_are_constrained_to_be_whole_are_split_as_the_loop_carries_them():
    # Sums over micro-batches begin with zeros in the parameters' layout; each device makes its own part of them.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = (jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("data")))

    def step(rows):
        start = jax.lax.with_sharding_constraint(jnp.zeros((64, 16)), whole)

        def turn(total, one):
            return jax.lax.with_sharding_constraint(total + one, split), None

        return jax.lax.scan(turn, start, rows)[0]

    rows = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    region = build(jax.make_jaxpr(step)(rows), [(((),) * 3, "batch", "")], dict(mesh.shape))
    made = [op.outs[0].shard for op in region.ops if op.name in ("broadcast_in_dim", "sharding_constraint")]
    assert made == [(8, 16), (8, 16)]


def test_a_product_is_computed_in_parts_where_it_is_multiplied_by_what_is_split():
    # No rule splits the matrix w; its product is padded and cut, and then meets one of a matrix that is split.
    def gated(x, w, gate):
        inner = jnp.pad(x @ w, ((3, 0), (0, 0)))[2:-1]
        return (1 - jax.nn.sigmoid(x @ gate)) * inner

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 8), (8, 64), (8, 64))]
    whole = ((), ())
    region = build(
        jax.make_jaxpr(gated)(*args), [(whole, "", ""), (whole, "", ""), (((), ("tensor",)), "", "")], {"tensor": 8}
    )
    assert [op.outs[0].shard for op in region.ops if op.name == "dot_general"] == [(16, 8), (16, 8)]
    assert [one.shard for one in region.inputs] == [(16, 8), (8, 64), (8, 8)]


def test_a_collective_over_one_device_is_the_same_memory():
    mesh = jax.make_mesh((8, 1), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def names(axis):
        gather = jax.shard_map(
            lambda x: jax.lax.all_gather(x, axis, tiled=True),
            mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False,
        )  # fmt: skip
        region = build(jax.make_jaxpr(gather)(jnp.zeros((16,))), [(((),), "", "")], dict(mesh.shape))
        return {op.name for op in region.ops} - {"enter", "enter_moved"}

    assert names("data") == set()
    assert names("replica") == {"all_gather"}


def test_a_table_that_a_loop_writes_in_slices_is_split_as_it_is_constrained_behind_the_loop():
    # A loss in chunks of the vocabulary: the loop carries the table's gradient with a dimension more.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, P(None, "data"))

    def step(rows, errors):
        def turn(table, i):
            product = jnp.einsum("nw,nv->vw", rows, errors)
            return jax.lax.dynamic_update_slice(table, product[None] * i, (0, i * 32, 0)), None

        table = jax.lax.scan(turn, jnp.zeros((1, 64, 16)), jnp.arange(2))[0]
        return jax.lax.with_sharding_constraint(table.reshape(64, 16), split)

    args = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    region = build(jax.make_jaxpr(step)(*args), [((("data",), ()), "batch", "x")] * 2, dict(mesh.shape))
    (loop,) = (op for op in region.ops if op.name == "scan")
    assert [one.shard for one in (*loop.ins[2:3], *loop.regions[0].outputs, *loop.outs)] == [(1, 64, 2)] * 3
    (product,) = (op for op in loop.regions[0].ops if op.name == "dot_general")
    assert sorted(product.outs[0].shard) == [16, 32]  # whole, to be summed over devices


@pytest.mark.parametrize(
    ("narrow", "wide", "left"),
    [
        (jnp.bfloat16, jnp.float32, 0),
        (jnp.float32, jnp.bfloat16, 2),
        (jnp.bfloat16, jnp.float16, 2),
        (jnp.float8_e4m3fn, jnp.bfloat16, 0),  # JAX has no common type of these
        (jnp.bfloat16, jnp.float8_e4m3fn, 2),
    ],
)
@pytest.mark.parametrize("looped", [False, True])
def test_a_conversion_to_a_wider_type_and_back_is_none(narrow, wide, left, looped):
    def there_and_back(x):
        return lax.cumsum(lax.cumsum(x).astype(wide).astype(narrow))

    def step(x):
        return lax.scan(lambda y, _: (there_and_back(y), None), x, None, length=2)[0] if looped else there_and_back(x)

    args = (jax.ShapeDtypeStruct((8, 128), narrow),)
    region = build(jax.make_jaxpr(step)(*args), [(((), ()), "batch", "")], {})
    assert sum(op.name == "convert_element_type" for op in every_op(region)) == left
