"""Collectives that some devices may never reach: which programs are refused, and which are not.

Every function runs in a `shard_map` on data=4, tensor=2, with `p` replicated and `rows` split over "data". Programs are
traced and read, never run: those that are refused would hang.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.proofs.parting import check_together, read_partings

MESH = js.make_mesh(data=4, tensor=2)


def total(x, axes="data"):
    return lax.psum(x, axes)


def count(rows):
    return rows.sum().astype(int)


def spread(fn, *, mesh=MESH):
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def trace(fn, **how):
    return jax.make_jaxpr(spread(fn, **how))(jnp.ones(8), jnp.ones((8, 4)))


def partings(program):
    return read_partings(program).partings


@jax.custom_vjp
def summed_backward(x):
    return 2 * x


summed_backward.defvjp(lambda x: (2 * x, None), lambda _, dx: (total(2 * dx),))


def read_late(p, rows):
    """Rows reach the predicate in the second iteration: before, it has what the carry began with."""

    def body(carry, _):
        now, later = carry
        return (later, rows.sum()), lax.cond(now > 0, lambda: total(p), lambda: p)

    return lax.scan(body, (0.0, 0.0), None, length=3)[1]


def loop_with_sum_in_test(p, rows):
    return lax.while_loop(lambda c: (total(c[0]) < 9.0) & (c[1] < rows.sum()), lambda c: (c[0] + 1, c[1] + 1), (0.0, 0))


REFUSED = {
    "psum": (lambda p, rows: lax.cond(rows.sum() > 0, lambda: total(p), lambda: p), "psum"),
    "the branch that is not first": (lambda p, rows: lax.cond(rows.sum() > 0, lambda: p, lambda: total(p)), "psum"),
    "switch": (
        lambda p, rows: lax.switch(count(rows), [lambda: p, lambda: 2 * p, lambda: lax.pmax(p, "data")]),
        "pmax",
    ),
    "all_gather in a scan": (
        lambda p, rows: lax.cond(
            rows.sum() > 0,
            lambda: lax.scan(lambda c, _: (c + lax.all_gather(c, "data").sum(0), None), p, None, length=2)[0],
            lambda: p,
        ),
        "all_gather",
    ),
    "a branch in a scan over rows": (
        lambda p, rows: lax.scan(lambda c, r: (lax.cond(r[0] > 0, total, lambda c: c, c), None), p, rows)[0],
        "psum",
    ),
    "a predicate that rows reach late": (read_late, "psum"),
    "while": (
        lambda p, rows: lax.while_loop(lambda c: c[0] < rows.sum(), lambda c: (c[0] + 1, total(c[1])), (0.0, p))[1],
        "psum",
    ),
    "while, in its test": (loop_with_sum_in_test, "psum"),
    "fori_loop": (lambda p, rows: lax.fori_loop(0, count(rows), lambda _, p: total(p), p), "psum"),
    "a backward pass of its own": (
        lambda p, rows: jax.grad(lambda p: lax.cond(rows.sum() > 0, lambda: summed_backward(p).sum(), lambda: p.sum()))(
            p
        ),
        "psum",
    ),
    "a branch in jit and checkpoint": (
        jax.jit(jax.checkpoint(lambda p, rows: lax.cond(rows.sum() > 0, lambda: total(p), lambda: p))),
        "psum",
    ),
    "an equal branch inside": (
        lambda p, rows: lax.cond(rows[0, 0] > 0, lambda: lax.cond(p[0] > 0, lambda: total(p), lambda: p), lambda: p),
        "psum",
    ),
    "the place of a device": (
        lambda p, rows: lax.cond(lax.axis_index("data") == 0, lambda: total(p), lambda: p),
        "psum",
    ),
    "a random number of a device": (
        lambda p, rows: lax.cond(
            jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))),
            lambda: total(p),
            lambda: p,
        ),
        "psum",
    ),
    "a callback": (
        lambda p, rows: lax.cond(
            jax.pure_callback(lambda: np.True_, jax.ShapeDtypeStruct((), bool)), lambda: total(p, "tensor"), lambda: p
        ),
        "psum",
    ),
    "a sum over another axis": (
        lambda p, rows: lax.cond(total(rows.sum(), "tensor") > 0, lambda: total(p), lambda: p),
        "psum",
    ),
    "all_to_all": (
        lambda p, rows: lax.cond(rows[0, 0] > 0, lambda: lax.all_to_all(p, "data", 0, 0, tiled=True), lambda: p),
        "all_to_all",
    ),
    "ppermute over another axis": (
        # Simulated devices hang here: all devices of the mesh take part in a permute.
        lambda p, rows: lax.cond(rows[0, 0] > 0, lambda: lax.ppermute(p, "tensor", [(0, 1), (1, 0)]), lambda: p),
        "ppermute",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name):
    fn, collective = REFUSED[name]
    with pytest.raises(ValueError, match=r"the step could hang") as error:
        check_together(trace(fn), "the step")
    assert f"is: {collective} of " in str(error.value) and f"{__file__}:" in str(error.value)


def loop_until_all_are_done(p, rows):
    return lax.while_loop(lambda c: total(c) < 9.0, lambda c: total(c) + 1, rows.sum())


def follow_a_table(p, rows):
    table = jnp.array([0, 2, 1])
    return lax.scan(lambda p, row: (lax.switch(row, [total, lambda p: p, lambda p: 2 * p], p), None), p, table)[0]


PASSED = {
    "before and after a branch": lambda p, rows: total(lax.cond(total(rows).sum() > 0, lambda: rows, lambda: -rows)),
    "a choice": lambda p, rows: jnp.where(rows.sum() > 0, total(p), p),
    "a sum": lambda p, rows: lax.cond(total(rows.sum()) > 0, lambda: total(p), lambda: p),
    "whether any device needs it": lambda p, rows: lax.cond(
        lax.pmax(rows.sum() > 0, ("data",)), lambda: total(p), lambda: p
    ),
    "gathered rows": lambda p, rows: lax.cond(lax.all_gather(rows, "data").min() > 0, lambda: total(p), lambda: p),
    "parameters": lambda p, rows: lax.cond(jnp.linalg.norm(p) > 1, lambda: total(p), lambda: p),
    "a random number of all": lambda p, rows: lax.cond(
        jax.random.bernoulli(jax.random.key(p[0].astype(int))), lambda: total(p), lambda: p
    ),
    "the place on another axis": lambda p, rows: lax.cond(lax.axis_index("tensor") == 0, lambda: total(p), lambda: p),
    "a table": follow_a_table,
    "a loop of fixed length": lambda p, rows: lax.fori_loop(0, 3, lambda i, p: total(p) * i, p),
    "a loop as long as parameters say": lambda p, rows: lax.while_loop(lambda c: c.sum() < 9, lambda c: total(c), p),
    "a loop until all are done": loop_until_all_are_done,
    "vmap over predicates": lambda p, rows: jax.vmap(lambda r: lax.cond(r[0] > 0, lambda: total(p), lambda: p))(rows),
    "the platform": lambda p, rows: lax.platform_dependent(p, cpu=total, default=lambda p: 2 * total(p)),
    "a gradient": lambda p, rows: jax.grad(
        lambda p: lax.cond(total(rows.sum()) > 0, lambda: total(p).sum(), lambda: p.sum())
    )(p),
    "an equal predicate in a scan": lambda p, rows: lax.scan(
        lambda c, r: (c + r[0], lax.cond(total(c) > 0, lambda: total(p), lambda: p)), 0.0, rows
    )[1],
}


@pytest.mark.parametrize("name", PASSED)
def test_is_let_through(name):
    closed = trace(PASSED[name])
    check_together(closed, "the step")
    assert not partings(closed)


def test_axes_of_one_device_part_nobody():
    branch, _ = REFUSED["psum"]
    mesh = js.make_mesh(jax.devices()[:2], data=1, tensor=2)
    assert partings(trace(branch)) and not partings(trace(branch, mesh=mesh))


def test_global_arrays_are_the_same_for_all_unless_a_shard_map_only_says_so():
    """Outside of `shard_map` all devices decide alike, unless a result that was said to be replicated is not."""

    def decide(flag):
        return lambda p, rows: lax.cond(flag(p, rows) > 0, lambda: spread(lambda p, rows: total(p))(p, rows), lambda: p)

    honest = decide(lambda p, rows: rows.sum())
    summed = decide(spread(lambda p, rows: total(rows.sum())))
    differs = decide(spread(lambda p, rows: rows.sum()))
    args = jnp.ones(8), jnp.ones((8, 4))
    assert not partings(jax.make_jaxpr(honest)(*args)) and not partings(jax.make_jaxpr(summed)(*args))
    (found,) = partings(jax.make_jaxpr(differs)(*args))
    assert (found.differ, found.axes) == (frozenset({"data"}), frozenset({"data"}))


def test_what_one_branch_saves_for_the_backward_pass_may_be_equal_on_all_devices():
    """A loop as long as the device that needs most, with exchanges, in a branch that all take; and its derivative."""

    @jax.custom_vjp
    def exchange(p, steps):
        return lax.fori_loop(0, steps, lambda _, p: lax.psum(p, "data"), p)

    exchange.defvjp(lambda p, steps: (exchange(p, steps), steps), lambda steps, dp: (exchange(dp, steps), None))
    right = spread(lambda p, rows: exchange(p, lax.pmax(count(rows), "data")))
    wrong = spread(lambda p, rows: exchange(p, count(rows)))

    def trace_gradient(fn):
        def loss(p, rows):
            return lax.cond(rows.sum() > 0, fn, lambda p, rows: p, p, rows).sum()

        return jax.make_jaxpr(jax.grad(loss))(jnp.ones(8), jnp.ones((8, 4)))

    assert not partings(trace_gradient(right))
    assert len(partings(trace_gradient(wrong))) == 2


def test_the_message_names_the_line_the_collective_its_axis_and_the_ways_out():
    def fn(p, rows):
        needed = rows.sum() > 0
        return lax.cond(needed, lambda: lax.pmean(p, "data"), lambda: p)

    line = fn.__code__.co_firstlineno + 2
    with pytest.raises(ValueError) as error:
        check_together(trace(fn), "the evaluation")
    first, branch, ways = str(error.value).split("\n")
    assert first.startswith("the evaluation could hang")
    assert branch == (
        f"  - {__file__}:{line}: which branch lax.cond takes may differ over ['data'], and inside is: "
        f"psum of f32[8] over ['data'] ({__file__}:{line})"
    )
    for way in ("jnp.where", "a weight of zero", "jax.lax.pmax(predicate, ('data',))", "js.auto()"):
        assert way in ways
