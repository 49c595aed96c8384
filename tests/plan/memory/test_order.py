"""Which sums are a part of what they add, and where the compiler gathers."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.order import (
    gather_late,
    join_scatters,
    scatter_on_sparse_cores,
    scatter_whole,
)

N = 64


def test_a_scatter_writes_into_what_it_is_added_to():
    # A tied table: the gradient of its use as output matrix, and that of the rows that were looked up.
    def grad(x, w, tokens, updates, start):
        return x @ w + start.at[tokens].add(updates)

    def names(start):
        args = (x, x, tokens, x, start) if start is not None else (x, x, tokens, x)
        fn = grad if start is not None else lambda *args: grad(*args, jnp.zeros((N, N)))
        region = build(jax.make_jaxpr(fn)(*args), [(((),) * len(one.shape), "", "") for one in args], {})
        join_scatters(region)
        return [op.name.replace("_", "-") for op in region.ops if op.name in ("add", "scatter-add", "scatter_add")]

    x, tokens = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.int32)
    joined, apart = names(None), names(x)
    assert joined.count("scatter-add") == 1
    assert apart.count("add") == joined.count("add") + 1  # what it would be written over is there already


@pytest.mark.parametrize(("rows", "sums_apart", "summed"), [("data", True, 1), ("data", False, 0), (None, True, 0)])
def test_a_product_that_the_compiler_sums_over_devices_is_no_part_of_a_scatter(rows, sums_apart, summed):
    def grad(x, w, tokens, updates):
        return x.T @ w + jnp.zeros((N, N)).at[tokens].add(updates)

    args = [jax.ShapeDtypeStruct((N, N), jnp.float32)] * 4
    args[2] = jax.ShapeDtypeStruct((N,), jnp.int32)
    splits = [(((rows,) if rows else ()), *((),) * (len(one.shape) - 1)) for one in args]
    region = build(jax.make_jaxpr(grad)(*args), [(split, "batch", "") for split in splits], {"data": 4})
    join_scatters(region, sums_apart=sums_apart)
    names = [op.name for op in region.ops]
    assert names.count("psum") == summed
    if summed:
        assert names[names.index("psum") - 1] == "dot_general"


@pytest.mark.parametrize(
    ("shape", "axes", "folded"),
    [((64, 1024), ("data",), False), ((64, 512), ("data",), True), ((64, 1024), ("data", "tensor"), True)],
)
def test_sparse_cores_scatter_over_some_axes_in_parts_of_more_than_one_tile(shape, axes, folded):
    # What is no scatter there is an all-reduce, of which each device takes its part.
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def add(x):
        return lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)

    mapped = jax.shard_map(add, mesh=mesh, in_specs=P(), out_specs=P(None, axes), check_vma=False)
    closed = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, jnp.float32))
    region = build(closed, [(((), ()), "", "")], dict(mesh.shape), frozenset({"data"}))
    scatter_on_sparse_cores(region)
    assert [op.folded for op in region.ops if op.name in ("reduce_scatter", "psum_scatter")] == [folded]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_weight_that_the_compiler_gathers_is_gathered_where_it_is_first_read(chosen):
    # Both gathers stand in front: a compiler that looks at memory runs the second one behind the first product.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = NamedSharding(mesh, P())

    def loss(first, last, x):
        first, last = (lax.with_sharding_constraint(one, whole) for one in (first, last))
        return jnp.sin(x @ first) @ last

    def stated(first, last, x):
        first, last = (lax.all_gather(one, "data", tiled=True) for one in (first, last))
        return jnp.sin(x @ first) @ last

    mapped = jax.shard_map(stated, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P(), check_vma=False)
    square = jax.ShapeDtypeStruct((N, N), jnp.float32)
    closed = jax.make_jaxpr(loss if chosen else mapped)(square, square, square)
    splits = [(("data",), ()), (("data",), ()), ((), ())]
    region = build(closed, [(split, "parameters", "w") for split in splits], dict(mesh.shape))

    def order():
        return [op.name for op in region.ops if op.name in ("sharding_constraint", "all_gather", "dot_general")]

    name = "sharding_constraint" if chosen else "all_gather"
    assert order() == [name, name, "dot_general", "dot_general"]
    gather_late(region)
    assert order() == ([name, "dot_general"] * 2 if chosen else [name, name, "dot_general", "dot_general"])


@pytest.mark.parametrize("rows", [8 * 8, 8 * 32])
def test_rows_of_all_devices_are_gathered_or_added_to_a_whole_array_whichever_are_fewer(rows):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def step(tokens, updates):
        return lax.with_sharding_constraint(jnp.zeros((128, N)).at[tokens].add(updates), split)

    args = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, N), jnp.float32)
    closed = jax.make_jaxpr(step)(*args)
    region = build(closed, [((("data",), *((),) * (len(x.shape) - 1)), "batch", "x") for x in args], dict(mesh.shape))
    scatter_whole(region)
    (scatter,) = (op for op in region.ops if op.name.startswith("scatter"))
    zeros, _, updates = scatter.ins
    gathered = rows < 128
    assert (zeros.shard, updates.shard) == (((16, N), (rows, N)) if gathered else ((128, N), (rows // 8, N)))
    assert [op.outs[0].shard for op in region.ops if op.name == "slice"] == ([] if gathered else [(16, N)])


def test_of_scatters_only_those_of_elements_are_joined_where_no_others_are():
    def added(x, rows, ones):
        labels = jnp.zeros((1, 64, 32)).at[0, rows, rows].add(ones[:, 0])
        return x * 2 + labels, x[0] * 2 + jnp.zeros((64, 32)).at[rows].add(ones)

    shapes = ((1, 64, 32), jnp.float32), ((16,), jnp.int32), ((16, 32), jnp.float32)
    closed = jax.make_jaxpr(added)(*(jax.ShapeDtypeStruct(*one) for one in shapes))
    region = build(closed, [(((),) * len(shape), "", "x") for shape, _ in shapes], {})
    join_scatters(region, elements=True)
    floats = [op.name for op in region.ops if op.outs[0].dtype == jnp.float32]
    assert (floats.count("scatter-add"), floats.count("add")) == (2, 1)  # the scatter of rows is added apart
