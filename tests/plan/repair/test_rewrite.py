"""A traced function run again with changed equations: values, derivatives and where the change goes."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.plan.repair.rewrite import is_constraint, leave_out, list_sites, run_changed
from jaxshard.plan.repair.unordered import needless_sorts


def line_of(function, needle):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if needle in line)}"


def doubled(operands, run):
    return [2 * x for x in run()]


def nested(x):
    """An equation inside of a scan, a branch, a jitted function and a checkpoint."""

    @jax.checkpoint
    def body(carry, _):
        carry = jax.lax.cond(carry.sum() > 0, lambda c: jax.jit(jnp.sin)(c), lambda c: c, carry)  # the equation
        return carry + 1.0, None

    return jax.lax.scan(body, x, length=3)[0].sum()


def test_an_equation_inside_loops_branches_and_checkpoints_is_changed_with_its_derivative():
    x = jnp.arange(1.0, 4.0)
    program = jax.make_jaxpr(nested)(x)
    (site,) = [site for site in list_sites(program) if site.primitive == "sin"]
    assert site.line == line_of(nested, "# the equation")

    def changed(x):
        return run_changed(program, [x], {site: doubled})[0]

    def by_hand(x):
        for _ in range(3):
            x = jnp.where(x.sum() > 0, 2 * jnp.sin(x), x) + 1.0
        return x.sum()

    (ours, our_slope), (theirs, their_slope) = (jax.jit(jax.value_and_grad(fn))(x) for fn in (changed, by_hand))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(our_slope, their_slope, rtol=1e-5)


def test_functions_with_derivatives_of_their_own_keep_them():
    @jax.custom_vjp
    def same(x):
        return x * 1.0

    same.defvjp(lambda x: (same(x), None), lambda _, cotangent: (5 * cotangent,))

    def fn(x):
        return same(jnp.sin(x)).sum()

    x = jnp.ones(2)
    program = jax.make_jaxpr(fn)(x)
    (site,) = [site for site in list_sites(program) if site.primitive == "sin"]
    got = jax.jit(jax.grad(lambda x: run_changed(program, [x], {site: doubled})[0]))(x)
    np.testing.assert_allclose(got, 10 * np.cos(1), rtol=1e-6)


def test_a_constraint_is_left_out():
    mesh = jax.make_mesh((8,), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def fn(x):
        return jax.lax.with_sharding_constraint(x + 1.0, whole) * 2.0

    x = jnp.ones(2)
    program = jax.make_jaxpr(fn)(x)
    changes = {site: leave_out for site, eqn in list_sites(program).items() if is_constraint(eqn)}
    assert len(changes) == 1
    after = jax.make_jaxpr(lambda x: run_changed(program, [x], changes))(x)
    assert "sharding_constraint" in str(program) and "sharding_constraint" not in str(after)
    np.testing.assert_array_equal(run_changed(program, [x], changes)[0], 4.0)


@pytest.mark.parametrize(
    ("looks_at", "needless"),
    [
        (lambda x: (2 * jnp.sort(x, 0)).sum(), True),
        (lambda x: jnp.exp(jnp.sort(x, 0)).max(0).sum(), True),
        (lambda x: jnp.square(jnp.sort(x, 0)).sum(1).sum(), True),
        (lambda x: jnp.sort(x, 0)[:2].sum(), False),
        (lambda x: jnp.sort(x, 0).sum(1)[0], False),
        (lambda x: (jnp.sort(x, 0) * x).sum(), False),
        (lambda x: (jnp.sort(x, 0) * jnp.arange(4.0)[:, None]).sum(), False),
        (lambda x: jnp.cumsum(jnp.sort(x, 0), 0).sum(), False),
        (lambda x: jnp.argsort(x, 0).sum(), False),
        (lambda x: [f(jnp.sort(x, 0)) for f in (jnp.sum, lambda s: s)], True),
        (lambda x: (lambda s: (s.sum(), s))(jnp.sort(x, 0)), False),
    ],
)  # fmt: skip
def test_a_sort_is_needless_where_only_sums_and_extremes_over_it_are_taken(looks_at, needless):
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert bool(list(needless_sorts(jax.make_jaxpr(looks_at)(x)))) is needless
