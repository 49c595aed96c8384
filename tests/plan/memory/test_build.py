"""Values of a traced program have the shapes that one device holds."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build


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
    # Nothing says how the gradient of a table is split: what a scatter writes into are zeros.
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
    # Sums over micro-batches begin with zeros in the parameters' layout; each device makes those that it adds to.
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


def test_a_product_over_a_split_dimension_is_known_to_be_summed_unless_the_batch_is_split_so():
    mesh = {"data": 2, "tensor": 4}

    def step(x, w):
        return x @ w, x.T @ x

    args = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    splits = [((("data",), ("tensor",)), "batch", ""), ((("tensor",), ()), "parameters", "")]

    def summed(batch):
        region = build(jax.make_jaxpr(step)(*args), [(batch, "batch", ""), splits[1]], mesh)
        return [op.summed for op in region.ops if op.name == "dot_general"]

    assert summed((("data",), ())) == [True, False]  # of activations; the other one is a gradient, summed once
    assert summed((("data",), ("tensor",))) == [False, False]


def test_a_collective_is_known_to_be_over_an_axis_that_covers_two_dimensions_of_a_torus():
    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def add(x):
        return jax.lax.psum_scatter(jax.lax.psum_scatter(x, "data", tiled=True), "context", tiled=True)

    step = jax.shard_map(add, mesh=mesh, in_specs=P(), out_specs=P(("data", "context")), check_vma=False)
    closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((64,), jnp.float32))
    region = build(closed, [(((),), "", "")], dict(mesh.shape), frozenset({"data"}))
    assert [op.folded for op in region.ops if op.name in ("reduce_scatter", "psum_scatter")] == [True, False]


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
