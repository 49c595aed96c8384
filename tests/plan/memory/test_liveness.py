"""The fullest moment of small programs, beside what is stored in them by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness, Moment
from jaxshard.plan.memory.roles import temporary_bytes
from jaxshard.plan.memory.shards import propagate, spec_split

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def fullest(fn, *args, narrow_products: bool = False) -> Moment:
    closed = jax.make_jaxpr(fn)(*args)
    region = build(closed, [(((),) * len(x.shape), "", "") for x in args], {})
    size = functools.partial(temporary_bytes, tiled=False)
    return Liveness(region, size, set(region.outputs), narrow_products=narrow_products).peak()


def test_elementwise_results_are_not_stored():
    assert fullest(lambda x: jnp.sum(jnp.exp(x) * 2 + x), SQUARE).total <= 8


def test_products_are_stored_until_they_were_read():
    # x @ x and its product with x are there at once, then the second and the third; the result is written in place.
    assert fullest(lambda x: ((x @ x) @ x) @ x, SQUARE).total == 2 * BYTES


def test_what_is_written_over_an_argument_frees_the_gathered_array_that_it_is_chosen_from():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def update(x, y, always):
        def gather(part):
            return jnp.where(always, lax.all_gather(part, "data", tiled=True), 0.0)

        return gather(x), gather(y)

    parts = (jax.P("data"), jax.P("data"), jax.P())
    step = jax.shard_map(update, mesh=mesh, in_specs=parts, out_specs=jax.P(), check_vma=False)
    split = [((("data",), ()), "", "")] * 2 + [((), "", "")]
    region = build(jax.make_jaxpr(step)(SQUARE, SQUARE, True), split, dict(mesh.shape))
    size = functools.partial(temporary_bytes, tiled=False)
    assert Liveness(region, size, set()).peak().total == 2 * BYTES
    assert Liveness(region, size, set(region.outputs)).peak().total <= BYTES + 1


def test_a_scan_stacks_what_its_backward_pass_reads():
    def loss(w):
        def body(x, _):
            return jnp.sin(x @ w), None

        return lax.scan(body, jnp.ones((N, N)), length=5)[0].sum()

    stacked = [one for one in fullest(jax.grad(loss), SQUARE).live if one.note == "stacked"]
    assert {one.bytes for one in stacked} == {5 * BYTES}


def test_splits_follow_products_and_reductions():
    rows, columns = (("data",), ()), ((), ("tensor",))
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    assert propagate("dot_general", numbers, [(rows, (8, 4)), (columns, (4, 6))], (8, 6)) == (("data",), ("tensor",))
    assert propagate("reduce_sum", {"axes": (0,)}, [(columns, (4, 6))], (6,)) == (("tensor",),)
    assert propagate("mul", {}, [(rows, (8, 4)), (columns, (1, 4))], (8, 4)) == (("data",), ("tensor",))
    assert spec_split(jax.sharding.PartitionSpec(("data", "tensor")), 2, frozenset({"data"})) == (("data",), ())


def test_a_scattered_gradient_is_there_twice_where_one_collective_sums_it_over_all_devices():
    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.PartitionSpec(("data", "context"))

    def copies(*axes, folded=()):
        def add(updates, tokens):
            made = jnp.zeros((1024, 512)).at[tokens].add(updates)
            for names in axes:
                made = lax.psum_scatter(made, names, scatter_dimension=0, tiled=True)
            return made

        step = jax.shard_map(add, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
        args = jax.ShapeDtypeStruct((64, 512), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
        splits = [(((),) * len(x.shape), "", "") for x in args]
        region = build(jax.make_jaxpr(step)(*args), splits, dict(mesh.shape), frozenset(folded))
        found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(), narrow_products=True)
        return [one.bytes for one in found.peak().live if one.note == "copy"]

    assert copies(("data", "context")) == [4 * 1024 * 512]
    assert copies("data", "context") == []
    assert copies("data") == []  # over one axis of two
    assert copies("data", "context", folded=("data",)) == [4 * 1024 * 512]  # over two dimensions of a torus


@pytest.mark.parametrize("offloaded", [True, False])
def test_gradients_of_the_last_turn_wait_behind_a_loop_over_offloaded_activations(offloaded):
    # Compilers take that turn out of the loop, and sum its gradients beside what follows.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "data")

    def step(stack, x):
        def turn(total, one):
            return total + 1, lax.psum_scatter(one @ x, "data", tiled=True)

        total, grads = lax.scan(turn, x, stack)
        with jax.named_scope("transpose"):
            return grads, total @ total @ total

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=jax.P(), out_specs=(spec, jax.P()), axis_names={"data"}, check_vma=False
    )
    args = jax.ShapeDtypeStruct((2, N, N), jnp.float32), SQUARE
    region = build(jax.make_jaxpr(mapped)(*args), [(((),) * len(x.shape), "", "") for x in args], dict(mesh.shape))
    (loop,) = (op for op in region.ops if op.name == "scan")
    loop.ins[-1].on_host = offloaded
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(), narrow_products=True).peak()
    assert [one.bytes for one in found.live if one.note == "copy"] == [BYTES] * offloaded


@pytest.mark.parametrize(("width", "copied"), [(8 * 128, []), (8 * 5, [8 * 8 * 256 * 4]), (8 * 3, [8 * 4 * 256 * 4])])
def test_matrices_that_are_gathered_along_the_lanes_are_joined_in_tiles_and_copied(width, copied):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "data")

    def gather(x):
        return lax.all_gather(x, "data", axis=1, tiled=True)

    mapped = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)
    closed = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((200, width), jnp.float32))
    region = build(closed, [(((), ("data",)), "parameters", "")], dict(mesh.shape))
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True, free=True), set(), narrow_products=True)
    assert [one.bytes for one in found.peak().live if one.note == "copy"] == copied


def test_a_table_that_the_compiler_gathers_along_the_lanes_is_copied_unless_it_is_a_result():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def copies(step):
        closed = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((200, 40), jnp.float32))
        region = build(closed, [(((), ("data",)), "parameters", "")], dict(mesh.shape))
        found = Liveness(region, lambda one: temporary_bytes(one, tiled=True, free=True), set(), narrow_products=True)
        return [one.bytes for one in found.peak().live if one.note == "copy"]

    def gathered(x):
        return jax.lax.with_sharding_constraint(x, whole)

    assert copies(lambda x: lax.cumsum(gathered(x))) == [8 * 8 * 256 * 4]
    assert copies(gathered) == []


def test_a_product_whose_parts_are_summed_beside_other_operations_is_there_twice():
    # As attention scores are where a head's dimension is split: the sum is written into another array.
    def step(x, w):
        return lax.cumsum(jnp.sin(x @ w))

    args = jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((512, 1024), jnp.float32)

    def largest(split):
        region = build(jax.make_jaxpr(step)(*args), [(((), ()), "batch", ""), ((split, ()), "", "")], {"tensor": 8})
        found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(), narrow_products=True)
        return [one.bytes for one in found.peak().live if one.note == "copy"]

    assert largest(("tensor",)) == [4 * 256 * 1024]
    assert largest(()) == []


def test_a_loop_gathers_a_stack_that_is_split_over_its_turns():
    def loop(stack, x):
        return lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    args = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)

    def copies(split):
        region = build(jax.make_jaxpr(loop)(*args), [(split, "parameters", ""), (((), ()), "", "")], {"tensor": 8})
        found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(), narrow_products=True)
        return [one.bytes for one in found.peak().live if one.note == "copy" and len(one.value.shape) == 3]

    assert copies((("tensor",), (), ())) == [8 * 4 * 128 * 128]
    assert copies(((), ("tensor",), ())) == []


@pytest.mark.parametrize("read_wide", [False, True])
def test_weights_that_a_branch_in_a_loop_slices_and_multiplies_are_converted_once_before_it(read_wide):
    def step(weights, x):
        def multiply(x):
            def block(x, number):
                return x @ lax.dynamic_index_in_dim(weights, number, keepdims=False), None

            return lax.scan(block, x, jnp.arange(2))[0]

        def turn(x, number):
            x = lax.cond(number > 1, multiply, jnp.sin, x)
            return (x + weights[0] if read_wide else x), None

        return lax.scan(turn, x, jnp.arange(3))[0]

    args = jax.ShapeDtypeStruct((2, N, N), jnp.float32), SQUARE
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "", "") for x in args], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(), narrow_products=True)
    assert [one.shard for copies in found.copies.values() for one in copies] == ([] if read_wide else [(2, N, N)])
    copies = [one.bytes for one in found.peak().live if one.note == "converted"]
    assert copies == [BYTES]  # both matrices in half their bytes; not again in the loops inside


def test_a_copy_that_is_converted_before_a_loop_is_what_the_loop_gathers_from():
    def step(table, tokens, counts):
        total = lax.scan(lambda sum_, one: (sum_ + one[1], None), 0, (table, counts))[0]  # does not use the table

        def turn(x, row):
            return x + table.astype(jnp.bfloat16)[row], None

        return lax.scan(turn, jnp.zeros((N, N), jnp.bfloat16), tokens)[0], total

    args = SQUARE, jax.ShapeDtypeStruct((3, N), jnp.int32), jax.ShapeDtypeStruct((N,), jnp.int32)
    live = fullest(step, *args, narrow_products=True).live
    converted = [one for one in live if one.bytes == BYTES // 2 and one.value.role == ""]
    assert len(converted) == 3 and [one.note for one in converted].count("converted") == 1  # x, its rows, the table


def test_a_weight_that_a_loop_narrows_and_widens_again_is_the_copy_before_the_loop():
    def step(weight, xs):
        def turn(total, x):
            w = weight.astype(jnp.bfloat16).astype(jnp.float32)
            return total + jnp.sin(x @ w) @ w.T, None

        return lax.scan(turn, jnp.zeros((8, N)), xs)[0]

    args = SQUARE, jax.ShapeDtypeStruct((3, 8, N), jnp.float32)
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "", "") for x in args], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=False), set(), narrow_products=True).peak()
    assert [one.note for one in found.live if one.bytes == BYTES // 2] == ["converted"]
