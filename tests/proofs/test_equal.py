"""Over which axes values may differ between devices. Nothing is compiled here: programs are traced and read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.proofs import equal
from jaxshard.proofs.equal import EQUAL, differing, differing_results
from jaxshard.proofs.walk import walk

MESH = js.make_mesh(data=4, tensor=2)
BOTH = frozenset({"data", "tensor"})
TABLE = np.arange(4.0)


def pair(a, b):
    return {"a": a, "b": b}


def inside(fn):
    """What `fn(p, rows, key)` makes on every device, given replicated p, rows over data, and a key."""

    def on_device(p, rows, key):
        return differing_results(fn, (p, rows, key), (EQUAL, frozenset({"data"}), EQUAL), BOTH)

    found = []
    jax.make_jaxpr(
        jax.shard_map(
            lambda *args: found.append(on_device(*args)) or args[1],
            mesh=MESH,
            in_specs=(P(), P("data"), P()),
            out_specs=P("data"),
            check_vma=False,
        )
    )(jnp.ones(4), jnp.ones((8, 4)), jax.random.key(0))
    return jax.tree.map(lambda axes: " ".join(sorted(axes)), found[0])


def read_ref(p, rows):
    ref = jax.new_ref(p)
    ref[...] = p + rows.sum(0)
    return ref[...]


GROUPS = [[0, 1], [2, 3]]
INSIDE = {
    "parameters and constants": (lambda p, rows, key: (p * TABLE, jnp.zeros(3), 2.0 * p), ("", "", "")),
    "rows": (lambda p, rows, key: (rows @ p, rows.shape[0] * p), ("data", "")),
    "an average of parameters": (lambda p, rows, key: pair(0.9 * p + 0.1 * TABLE, rows.mean(0)), pair("", "data")),
    "a sum over the axis": (lambda p, rows, key: lax.psum(rows, "data"), ""),
    "a mean, a maximum, a minimum": (
        lambda p, rows, key: (lax.pmean(rows, "data"), lax.pmax(rows, "data"), lax.pmin(rows, ("data", "tensor"))),
        ("", "", ""),
    ),
    "a sum over another axis": (lambda p, rows, key: lax.psum(rows, "tensor"), "data"),
    "a sum over groups": (lambda p, rows, key: lax.psum(rows, "data", axis_index_groups=GROUPS), "data"),
    "a gather": (lambda p, rows, key: lax.all_gather(rows, "data", tiled=True), ""),
    "a part of a sum": (lambda p, rows, key: lax.psum_scatter(p, "data", tiled=True), "data"),
    "a permutation": (lambda p, rows, key: lax.ppermute(p, "data", [(0, 1), (1, 2)]), "data"),
    "an exchange": (lambda p, rows, key: lax.all_to_all(p, "data", 0, 0, tiled=True), "data"),
    "the place of a device": (
        lambda p, rows, key: (lax.axis_index("data"), lax.axis_index(("data", "tensor")), lax.axis_size("data")),
        ("data", "data tensor", ""),
    ),
    "random numbers of a device": (
        lambda p, rows, key: jax.random.normal(jax.random.fold_in(key, lax.axis_index("tensor")), (3,)),
        "tensor",
    ),
    "a callback": (lambda p, rows, key: jax.pure_callback(lambda p: p, p, p), "data tensor"),
    "a reference": (lambda p, rows, key: read_ref(p, rows), "data tensor"),
    "a branch on equal values": (lambda p, rows, key: lax.cond(p[0] > 0, lambda: p, lambda: 2 * p), ""),
    "a branch on rows": (lambda p, rows, key: lax.cond(rows.sum() > 0, lambda: p, lambda: 2 * p), "data"),
    "a loop as long as rows say": (
        lambda p, rows, key: lax.while_loop(lambda c: c[0] < rows.sum(), lambda c: (c[0] + 1, 2 * c[1]), (0.0, p))[1],
        "data",
    ),
    "a loop that rows reach late": (
        lambda p, rows, key: lax.scan(lambda c, _: ((c[1], c[0] + rows.sum()), c[1]), (p, p), None, 3)[0][0],
        "data",
    ),
    "a derivative by parameters": (lambda p, rows, key: jax.grad(lambda p: (rows @ p).sum())(p), "data"),
    "checkpoint and barrier": (
        lambda p, rows, key: jax.checkpoint(lambda p, r: lax.optimization_barrier((p, r)))(p, rows),
        ("", "data"),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_over_which_axes_results_differ(name):
    fn, expected = INSIDE[name]
    assert inside(fn) == expected


def test_facts_are_carried_through_results_of_shard_map_that_say_they_are_replicated():
    def on_device(rows, p):
        return rows.sum(0), rows, p, lax.psum(rows, "data"), lax.axis_index("tensor")

    fn = jax.shard_map(
        on_device,
        mesh=MESH,
        in_specs=(P("data"), P(None, "tensor")),
        out_specs=(P(), P("data"), P(None, "tensor"), P(), P()),
        check_vma=False,
    )
    closed = jax.make_jaxpr(lambda rows, p: jax.jit(fn)(rows, p))(jnp.ones((8, 4)), jnp.ones((2, 4)))
    data, tensor = frozenset({"data"}), frozenset({"tensor"})
    assert differing(closed, [EQUAL, EQUAL]) == [data, EQUAL, EQUAL, EQUAL, tensor]


def test_facts_go_into_a_nested_shard_map_and_come_out():
    def nested(p):
        return p + lax.axis_index("tensor"), p.sum(), lax.psum(p, "tensor")

    def on_device(rows):
        how = {"in_specs": P("tensor"), "out_specs": (P("tensor"), P(), P())}
        return jax.shard_map(nested, axis_names={"tensor"}, check_vma=False, **how)(rows)

    fn = jax.shard_map(
        on_device, mesh=MESH, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=False
    )  # fmt: skip
    data = frozenset({"data"})
    assert differing(jax.make_jaxpr(fn)(jnp.ones(8)), [EQUAL]) == [data, BOTH, data]


def test_a_name_of_our_own_tells_micro_batches_apart_and_no_sum_over_devices_takes_it_away():
    def new_state(p, state, rows):
        teacher = 0.9 * state["teacher"] + 0.1 * p
        return {"teacher": teacher, "count": state["count"] + 1, "seen": state["seen"] + lax.psum(rows.sum(), "data")}

    state = {"teacher": jnp.ones(4), "count": 0, "seen": 0.0}
    rows = frozenset({"data", "micro-batch"})

    def on_device(p, state, batch):
        found.append(differing_results(new_state, (p, state, batch), (EQUAL, EQUAL, rows), frozenset({"data"})))
        return batch

    found: list[dict[str, frozenset[str]]] = []
    how = {"mesh": MESH, "in_specs": (P(), P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    jax.make_jaxpr(jax.shard_map(on_device, check_vma=False, **how))(jnp.ones(4), state, jnp.ones((8, 4)))
    assert found == [{"teacher": EQUAL, "count": EQUAL, "seen": frozenset({"micro-batch"})}]


def test_the_names_of_collectives_are_jax_s():
    """What JAX renames would no longer be found: every name is one of a primitive of some supported version."""
    known = {one.name for one in vars(parallel).values() if isinstance(one, Primitive)}
    missing = (equal.SUMS | equal.EXCHANGES | {"axis_index"}) - known
    assert missing <= {"pbroadcast_dynamic", "unreduced_pmax", "unreduced_pmin"}  # newer than JAX 0.10
    casts = {"preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"}
    known = {name.removesuffix("_start").removesuffix("_invariant") for name in known if not name.endswith("_done")}
    assert known - casts - {"axis_index"} <= equal.SUMS | equal.EXCHANGES


def test_shards_that_are_equal_stay_so_on_their_way_to_the_backward_pass():
    """What a `shard_map` saves for its backward pass is split over all axes in between, the equal numbers too."""

    def on_device(p, rows):
        steps = lax.pmax(rows.sum().astype(int), "data")
        return scaled(p, steps), scaled(p, rows.sum().astype(int))

    @jax.custom_vjp
    def scaled(p, steps):
        return p * steps

    scaled.defvjp(lambda p, steps: (p * steps, steps), lambda steps, dy: (dy * (steps > 0), None))
    fn = jax.shard_map(on_device, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)

    def backward(p, rows):
        seen = jax.vjp(lambda p: fn(p, rows), p)[1]
        one = jax.numpy.ones(16)
        return seen((one, one))

    found = []

    class Comparisons(equal.Differences):
        def conclude(self, place, operands, results):
            if place.settled and place.name == "gt":
                found.append(operands[0].over)
            return results

    closed = jax.make_jaxpr(backward)(jnp.ones(4), jnp.ones((8, 4)))
    walk(closed, [equal.Difference()] * 2, Comparisons())
    assert sorted(map(len, found)) == [0, 1]


def test_a_scan_stacks_shards_that_are_equal_and_takes_them_apart_again():
    """A stack of equal shards is split otherwise than its rows: read whole, its parts differ."""

    def save(p):
        return p, lax.pmax(p.sum(), "data")[None]

    everywhere = P(("data", "tensor"))
    save = jax.shard_map(save, mesh=MESH, in_specs=P(), out_specs=(P(), everywhere), check_vma=False)
    read = jax.shard_map(lambda x: x.sum(), mesh=MESH, in_specs=everywhere, out_specs=P(), check_vma=False)

    def fn(p):
        p, saved = lax.scan(lambda p, _: save(p), p, None, length=8)
        _, rows = lax.scan(lambda c, one: (c, read(one)), 0, saved)
        return rows, read(saved)

    assert differing(jax.make_jaxpr(fn)(jnp.ones(4)), [EQUAL]) == [EQUAL, BOTH]
