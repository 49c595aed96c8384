"""The walk over programs: facts go through calls, loops and branches, for any domain. Nothing is compiled here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.core.primitives import ELEMENTWISE
from jaxshard.proofs.walk import Domain, walk

NONE: frozenset[str] = frozenset()
REACH = Domain(
    literal=lambda value: NONE,
    constant=lambda array: NONE,
    join=lambda facts: NONE.union(*facts),
    rule=lambda place, facts: None,
)
"""Which inputs reach a value."""

x, y, z = jnp.ones(()), jnp.full((), 2.0), jnp.ones(4)


def reach(fn, *args):
    """The names of the inputs that reach each result, such as ["xy", ""]."""
    closed = jax.make_jaxpr(fn)(*args)
    return ["".join(sorted(one)) for one in walk(closed, [frozenset(name) for name in "xyz"[: len(args)]], REACH)]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dx: (2 * dx,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda primals, tangents: (3 * primals[0], 3 * tangents[0]))

REACHED = {
    "plain": (lambda x, y: (x + 1, y, 3.0), ["x", "y", ""]),
    "a constant": (lambda x: (x + z, z * 2), ["x", ""]),
    "jit": (lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), ["y", "x"]),
    "checkpoint": (lambda x, y: jax.checkpoint(lambda a, b: (jnp.sin(a), b))(x, y), ["x", "y"]),
    "custom_vjp": (lambda x, y: (doubled(x), y), ["x", "y"]),
    "custom_jvp": (lambda x, y: (tripled(x), y), ["x", "y"]),
    "a gradient of a checkpoint": (lambda x, y: jax.grad(jax.checkpoint(lambda a: jnp.sin(a * y)))(x), ["xy"]),
    "cond": (lambda x, y: lax.cond(x > 0, lambda: (y, 1.0), lambda: (2 * y, 0.0)), ["xy", "x"]),
    "cond on a constant": (lambda x, y: lax.cond(z[0] > 0, lambda: x, lambda: 2 * y), ["xy"]),
    "scan": (lambda x, z: lax.scan(lambda c, z: (c, z + 1), x, z), ["x", "y"]),
    "scan, the second iteration": (
        lambda x, y, z: lax.scan(lambda c, _: ((c[1], c[0] + z[0]), c[0]), (x, y), None, length=3),
        ["xyz", "xyz", "xyz"],
    ),
    "while": (lambda x, y: lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, 2 * c[1]), (0.0, y)), ["x", "xy"]),
    "while, the third iteration": (
        lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2], x, y), (0.0, 1.0, 2.0, 3.0))[1:],
        ["x", "x", "y"],
    ),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), ["xy", "xy"]),
    "shard_map": (
        lambda x, y: jax.shard_map(
            lambda a, b: (b, a),
            mesh=js.make_mesh(data=8),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x, y),
        ["y", "x"],
    ),
    "callback": (lambda x, y: (jax.pure_callback(lambda a: a, x, x), y), ["x", "y"]),
}


@pytest.mark.parametrize("name", REACHED)
def test_facts_go_through(name):
    fn, expected = REACHED[name]
    args = (x, z) if "z" in fn.__code__.co_varnames and fn.__code__.co_argcount == 2 else (x, y, z)
    assert reach(fn, *args[: fn.__code__.co_argcount]) == expected


def test_a_domain_says_what_becomes_of_scanned_rows_and_of_what_it_does_not_know():
    """Another domain: for each value the dimension along which it has one entry per row of a batch; None without."""
    lost = "lost"

    def join(facts):
        return facts[0] if len(set(facts)) == 1 else lost

    def rule(place, facts):
        if place.name not in ELEMENTWISE:
            return None
        along = {fact for fact in facts if fact is not None}
        return place.joined(along.pop() if len(along) == 1 else lost if along else None)

    def shift(by):
        def shifted(place, facts):
            # Constants and carries keep their dimensions, rows lose the first, stacked results have it in front.
            kept = 2 if by < 0 else 1
            return [fact + by if i >= kept and isinstance(fact, int) else fact for i, fact in enumerate(facts)]

        return shifted

    domain = Domain(
        lambda value: None,
        lambda array: None,
        join,
        rule,
        unknown=lambda place, facts: place.joined(lost),
        enter=shift(-1),
        leave=shift(1),
    )

    def fn(rows, over):
        total, out = lax.scan(lambda c, one: (c + 1, one * rows), 0.0, over)
        return total, out, jnp.cumsum(rows)

    closed = jax.make_jaxpr(fn)(jnp.ones(4), jnp.ones((3, 4)))
    assert walk(closed, [0, 1], domain) == [None, 1, lost]


def test_every_equation_is_visited_once_with_facts_that_hold_and_with_what_is_around_it():
    def fn(x, y):
        def body(carry, _):
            # The first iteration has x alone, later ones y too.
            carry = lax.cond(carry > 0, lambda: jnp.sin(carry), lambda: carry)
            return carry + y, None

        return lax.while_loop(lambda c: c < y, jnp.cos, lax.scan(body, x, None, length=3)[0])

    seen = {}

    def visit(place, facts):
        assert place.name not in seen or place.name not in ("sin", "cos", "lt")
        seen[place.name] = facts, [(one.equation.primitive.name, one.choice) for one in place.around]

    walk(jax.make_jaxpr(fn)(x, y), [frozenset("x"), frozenset("y")], REACH, visit)
    both = frozenset("xy")
    assert seen["sin"] == ([both], [("scan", None), ("cond", both)])
    assert seen["cos"] == ([both], [("while", both)])
    assert seen["lt"][1] == [("while", both)]


def test_loops_in_loops_are_walked_in_little_time():
    """Every level needs three walks of what is in it: 3 ** 12 without the results that are remembered."""

    def nested(depth, carry):
        if not depth:
            return carry[1], carry[0] + 1
        return lax.scan(lambda c, _: (nested(depth - 1, c), None), carry, None, length=2)[0]

    count = 0

    def rule(place, facts):
        nonlocal count
        count += 1

    domain = Domain(REACH.literal, REACH.constant, REACH.join, rule)
    found = walk(jax.make_jaxpr(lambda x, y: nested(12, (x, y)))(x, y), [frozenset("x"), frozenset("y")], domain)
    assert found == [frozenset("xy")] * 2 and count < 200
