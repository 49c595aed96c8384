"""Programs whose communication is known: axes, counts with loops, bytes of whole arrays, source lines."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.hlo.found import Row, arrays_only, collectives, split_scalars, summary, table
from tests.hlo.programs import mesh_of

F32 = 4


CUBE = {"a": 2, "b": 2, "c": 2}
RING = [(0, 1), (1, 0)]


def compile_manual(mesh, function):
    """The function on each device's own [32, 16] array."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 16), jnp.float32)).compile()


def audit_manual(mesh, function):
    return collectives(compile_manual(mesh, function), mesh)


WHOLE = 32 * 16 * F32


@pytest.mark.parametrize(
    ("function", "row"),
    [
        (lambda x: lax.psum(x, ("c", "a")), Row("all-reduce", ("a", "c"), 1, WHOLE)),
        (lambda x: lax.all_gather(x, "c", axis=1, tiled=True), Row("all-gather", ("c",), 1, 2 * WHOLE)),
        (lambda x: lax.all_gather(x, ("b", "a")), Row("all-gather", ("a", "b"), 1, 4 * WHOLE)),
        (lambda x: lax.psum_scatter(x, "a", tiled=True), Row("reduce-scatter", ("a",), 1, WHOLE)),
        (lambda x: lax.psum_scatter(x, ("c", "b"), tiled=True), Row("reduce-scatter", ("b", "c"), 1, WHOLE)),
        (lambda x: lax.all_to_all(x, "c", 0, 1, tiled=True), Row("all-to-all", ("c",), 1, WHOLE)),
        (lambda x: lax.ppermute(x, "a", RING), Row("collective-permute", ("a",), 1, WHOLE)),
    ],
)
def test_every_kind_with_its_axes_and_bytes(function, row):
    assert summary(audit_manual(mesh_of(**CUBE), function)) == (row,)


def test_positions_in_a_mesh_of_devices_in_another_order():
    mesh = mesh_of([3, 1, 4, 0, 5, 2, 7, 6], a=2, b=4)

    def function(x):
        return lax.psum(x, "b") + lax.psum(lax.all_gather(x, ("b", "a")).sum(0), "a")

    assert summary(audit_manual(mesh, function)) == (
        Row("all-reduce", ("a",), 1, WHOLE),
        Row("all-reduce", ("b",), 1, WHOLE),
        Row("all-gather", ("a", "b"), 1, 8 * WHOLE),
    )


def test_axes_of_size_one_do_not_communicate():
    mesh = mesh_of(one=1, data=8)
    assert audit_manual(mesh, lambda x: lax.psum(x, "one")) == ()
    (reduced,) = audit_manual(mesh, lambda x: lax.psum(x, ("one", "data")))
    assert reduced.axes == ("data",)
    assert audit_manual(mesh, lambda x: lax.ppermute(x, "data", [(i, i) for i in range(8)])) == ()


def test_a_loop_whose_turns_the_data_decide_has_no_count():
    def function(x):
        turns = x[0, 0].astype(jnp.int32)
        return lax.fori_loop(0, turns, lambda _, x: lax.ppermute(x, "data", [(0, 1)]), lax.psum(x, "data"))

    known, unknown = audit_manual(mesh_of(data=8), function)
    assert (known.kind, known.count, known.bytes) == ("all-reduce", 1, WHOLE)
    assert (unknown.kind, unknown.count, unknown.bytes) == ("collective-permute", None, None)
    text = table(summary([known, unknown]))
    assert "collective-permute  data      ?      ?" in text
    assert "count ?: inside a loop whose trip count is only known while it runs" in text
    (row,) = summary([unknown, unknown])
    assert row.as_dict() == {"kind": "collective-permute", "axis": "data", "count": None, "bytes": None}


def test_combined_scalars_and_arrays_are_taken_apart():
    def function(x):
        return lax.psum((x, x.sum(), 2 * x[:8]), "data")

    found = audit_manual(mesh_of(data=8), function)
    assert summary(found) == (Row("all-reduce", ("data",), len(found), WHOLE + F32 + WHOLE // 4),)
    arrays, scalars = split_scalars(found)
    assert sorted(shape for one in arrays for shape in one.shapes) == [(8, 16), (32, 16)]
    assert sum(one.bytes for one in arrays) == WHOLE + WHOLE // 4
    assert [one.shapes for one in scalars] == [((),)]
    assert arrays_only(found) == arrays
    assert sum(one.bytes for one in arrays_only(found, above=8 * 16)) == WHOLE


def test_a_program_for_other_devices_is_refused():
    mesh = mesh_of(data=4, tensor=2)
    small = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    with pytest.raises(ValueError, match=r"compiled for 1 device\(s\), the mesh \(data=4, tensor=2\) has 8"):
        collectives(small, mesh)
    compiled = compile_manual(mesh, lambda x: lax.psum(x, "data"))
    other = mesh_of([1, 0, 2, 3, 4, 5, 6, 7], data=4, tensor=2)
    with pytest.raises(ValueError, match=r"devices \[0, 1, 2, .* in this order, the mesh has \[1, 0, 2,"):
        collectives(compiled, other)
