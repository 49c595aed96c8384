"""Tables whose width does not fill the lanes: what reads or adds to their rows does so in a copy by rows."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.graph import every_op
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.roles import temporary_bytes
from jaxshard.plan.memory.turned import added_in_turned_layouts, updated_by_rows

ROWS, TOKENS = 4096, 64


def additions(width):
    """The bytes of the copies of each addition that two branches of a turn make, in order."""

    def step(ids, logits, h):
        def turn(total, i):
            def head(total):
                return total + jnp.where(i > 1, 0, logits.T @ h)

            def look_up(total):
                rows = jnp.zeros((ROWS, width), jnp.bfloat16).at[ids].add(h.astype(jnp.bfloat16))
                return total + rows.astype(jnp.float32)

            total = lax.cond(i > 2, head, lambda total: total, total)
            return lax.cond(i > 3, look_up, lambda total: total, total), None

        return lax.scan(turn, jnp.zeros((ROWS, width)), jnp.arange(4))[0]

    shapes = ((TOKENS,), jnp.int32), ((TOKENS, ROWS), jnp.float32), ((TOKENS, width), jnp.float32)
    args = [jax.ShapeDtypeStruct(*one) for one in shapes]
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(x.shape), "batch", "") for x in args], {})
    found = added_in_turned_layouts(region)
    return [found[op] for op in every_op(region) if op in found]


LEAST, BY_ROWS = 4 * ROWS * 64, 4 * ROWS * 128


@pytest.mark.parametrize(("width", "copies"), [(64, [(LEAST, LEAST), (BY_ROWS, BY_ROWS)]), (128, [])])
def test_each_branch_copies_the_table_to_its_layout_and_adds_to_another_array(width, copies):
    assert additions(width) == copies


@pytest.mark.parametrize(("width", "copies"), [(64, 2 * BY_ROWS), (128, 0)])
def test_a_step_reads_a_copy_by_rows_of_a_table_that_it_looks_up_and_of_its_state(width, copies):
    # The gradient is scattered by rows: an update of the whole table is computed so.
    def step(table, momentum, ids, h):
        gradient = jnp.zeros((ROWS, width)).at[ids].add(table[ids] * h)
        momentum = momentum * 0.9 + gradient
        return table - momentum, momentum

    table = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    ids, h = jax.ShapeDtypeStruct((TOKENS,), jnp.int32), jax.ShapeDtypeStruct((TOKENS, width), jnp.float32)
    state = (table, "parameters", "params/table"), (table, "optimizer state", "opt_state/0/mu/table")
    arguments = (*state, (ids, "batch", "ids"), (h, "batch", "h"))
    closed = jax.make_jaxpr(step)(table, table, ids, h)
    region = build(closed, [(((),) * len(x.shape), role, path) for x, role, path in arguments], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    made = [one for copies in found.copies.values() for one in copies]
    assert sum(found.size(one) for one in made) == copies
    assert all(found.last[one] >= max(found.copies) for one in made)


@pytest.mark.parametrize(("looped", "copied"), [(True, {ROWS * 128 * 2}), (False, {ROWS * 128 * 4})])
def test_where_loops_read_a_converted_table_rows_are_looked_up_in_a_copy_of_that(looped, copied):
    # Without a loop products convert the table themselves, and the rows of the argument are converted.
    def step(table, ids, h):
        narrow = table.astype(jnp.bfloat16)
        rows = narrow[ids]
        if looped:
            return lax.scan(lambda total, x: (total + (x @ table.T).sum(), None), 0.0, h * rows.sum())[0], table
        return (h.astype(jnp.bfloat16) @ narrow.T).sum() + rows.sum(), table

    shapes = ((ROWS, 64), jnp.float32), ((TOKENS,), jnp.int32), ((4, TOKENS, 64), jnp.float32)
    args = [jax.ShapeDtypeStruct(*one) for one in shapes]
    roles = ("parameters", "params/table"), ("batch", "ids"), ("batch", "h")
    arguments = [(((),) * len(x.shape), *role) for x, role in zip(args, roles, strict=True)]
    region = build(jax.make_jaxpr(step)(*args), arguments, {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    made = [one for copies in found.copies.values() for one in copies if one.shard == (ROWS, 128)]
    assert {found.size(one) for one in made} == copied


@pytest.mark.parametrize(
    ("columns", "over", "copies"),
    [(48, ("data",), 2), (16, ("data",), 0), (128, ("data",), 0), (48, ("tensor",), 0)],
    ids=["", "few columns", "full lanes", "not as the batch"],
)
def test_the_update_of_columns_of_a_table_reads_copies_by_rows_from_the_start(columns, over, copies):
    mesh = jax.make_mesh((8, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole, columns_of = (NamedSharding(mesh, P(None, axis)) for axis in (None, over[0]))

    def step(table, state, ids, h):
        gathered = lax.with_sharding_constraint(table, whole)
        grad = jax.grad(lambda table: jnp.sum(jnp.sin(table[ids]) * h))(gathered)
        grad = lax.with_sharding_constraint(grad, columns_of)
        return table - (grad + state), grad + state

    table = jax.ShapeDtypeStruct((ROWS, 8 * columns), jnp.float32)
    rows = jax.ShapeDtypeStruct((8 * TOKENS, 8 * columns), jnp.float32)
    args = table, table, jax.ShapeDtypeStruct((8 * TOKENS,), jnp.int32), rows
    split, batch = ((), over), (("data",), ())
    arguments = [(split, "parameters", "params/t"), (split, "optimizer state", "opt_state/t")]
    arguments += [((("data",),), "batch", "ids"), (batch, "batch", "h")]
    region = build(jax.make_jaxpr(step)(*args), arguments, {"data": 8, "tensor": 8})
    assert [scatter for _, scatter in updated_by_rows(region)] == [None] * copies
    found = Liveness(
        region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs),
        narrow_products=True, stacks_first=True,
    )  # fmt: skip
    made = [one for place in sorted(found.copies)[:1] for one in found.copies[place] if one.shard == (ROWS, 128)]
    assert len(made) == copies
    assert all(found.size(one) == 4 * ROWS * 128 for one in made)


@pytest.mark.parametrize(("columns", "copies"), [(48, 2), (16, 0), (128, 0)], ids=["", "few columns", "full lanes"])
def test_the_update_of_columns_reads_copies_from_where_the_program_scatters_the_whole_gradient(columns, copies):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(table, state, ids, h):
        grad = jnp.zeros((ROWS, 8 * columns), h.dtype).at[ids].add(jnp.sin(h))
        grad = lax.psum_scatter(grad, "data", scatter_dimension=1, tiled=True)
        return table - (grad + state), grad + state

    rows = jax.ShapeDtypeStruct((8 * TOKENS, 8 * columns), jnp.float32)
    table = jax.ShapeDtypeStruct((ROWS, 8 * columns), jnp.float32)
    args = table, table, jax.ShapeDtypeStruct((8 * TOKENS,), jnp.int32), rows
    split, batch = P(None, "data"), P("data")
    traced = jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=(split, split, batch, batch), out_specs=split))
    whole = ((), ("data",)), (("data",),), (("data",), ())
    arguments = [(whole[0], "parameters", "params/t"), (whole[0], "optimizer state", "opt_state/t")]
    arguments += [(whole[1], "batch", "ids"), (whole[2], "batch", "h")]
    region = build(traced(*args), arguments, {"data": 8})
    assert [scatter.name for _, scatter in updated_by_rows(region)] == ["scatter-add"] * copies
    found = Liveness(
        region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs),
        narrow_products=True, stacks_first=True,
    )  # fmt: skip
    made = {found.ops[place].name: [one.shard for one in found.copies[place]] for place in found.copies}
    assert made == ({"scatter-add": [(ROWS, 128)] * 2} if copies else {})
