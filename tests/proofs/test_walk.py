"""The walk over programs: facts go through calls, loops and branches, for any domain. Nothing is compiled here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.core.primitives import ELEMENTWISE
from jaxshard.proofs.walk import Domain, Refused, walk

NONE: frozenset[str] = frozenset()


class Reach(Domain):
    """Which inputs reach a value; keeps the facts of every settled equation."""

    def __init__(self):
        self.count = 0
        self.concluded = []

    def value(self, values, place):
        return NONE

    def join(self, place, facts):
        return NONE.union(*facts)

    def rule(self, place, facts):
        self.count += 1
        return None

    def conclude(self, place, operands, results):
        if place.settled:
            self.concluded.append((place, operands))
        return results


x, y, z = jnp.ones(()), jnp.full((), 2.0), jnp.ones(4)


def reach(fn, *args):
    """The names of the inputs that reach each result, such as ["xy", ""]."""
    closed = jax.make_jaxpr(fn)(*args)
    return ["".join(sorted(one)) for one in walk(closed, [frozenset(name) for name in "xyz"[: len(args)]], Reach())]


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

    def shifted(facts, kept, by):
        # Constants and carries keep their dimensions, rows lose the first, stacked results have it in front.
        return [fact + by if i >= kept and isinstance(fact, int) else fact for i, fact in enumerate(facts)]

    class Along(Reach):
        def value(self, values, place):
            return None

        def join(self, place, facts):
            return facts[0] if len(set(facts)) == 1 else lost

        def rule(self, place, facts):
            if place.name not in ELEMENTWISE:
                return None
            along = {fact for fact in facts if fact is not None}
            return place.joined(along.pop() if len(along) == 1 else lost if along else None)

        def unknown(self, place, facts):
            return place.joined(lost)

        def enter(self, place, facts):
            return shifted(facts, 2, -1)

        def leave(self, place, facts):
            return shifted(facts, 1, 1)

    def fn(rows, over):
        total, out = lax.scan(lambda c, one: (c + 1, one * rows), 0.0, over)
        return total, out, jnp.cumsum(rows)

    closed = jax.make_jaxpr(fn)(jnp.ones(4), jnp.ones((3, 4)))
    assert walk(closed, [0, 1], Along()) == [None, 1, lost]


def test_every_equation_is_concluded_once_with_facts_that_hold_and_with_what_is_around_it():
    def fn(x, y):
        def body(carry, _):
            # The first iteration has x alone, later ones y too.
            carry = lax.cond(carry > 0, lambda: jnp.sin(carry), lambda: carry)
            return carry + y, None

        return lax.while_loop(lambda c: c < y, jnp.cos, lax.scan(body, x, None, length=3)[0])

    domain = Reach()
    walk(jax.make_jaxpr(fn)(x, y), [frozenset("x"), frozenset("y")], domain)
    names = [place.name for place, _ in domain.concluded]
    assert all(names.count(name) == 1 for name in ("sin", "cos", "lt"))
    seen = {
        place.name: (facts, [(one.equation.primitive.name, one.choice) for one in place.around])
        for place, facts in domain.concluded
    }
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

    domain = Reach()
    found = walk(jax.make_jaxpr(lambda x, y: nested(12, (x, y)))(x, y), [frozenset("x"), frozenset("y")], domain)
    assert found == [frozenset("xy")] * 2 and domain.count < 200


class Sizes(Reach):
    """Whether a value is the same function of its arguments at two sets of shapes; refuses products."""

    def value(self, values, place):
        return bool(np.array_equal(*values))

    def join(self, place, facts):
        return all(facts)

    def rule(self, place, facts):
        if place.name == "dot_general":
            raise Refused
        return place.joined(all(facts))

    def refused(self, place, facts, refusal):
        return place.joined("refused")

    def differ(self, place, difference, results):
        return [difference.what] * len(results)


SIZED = {
    "alike": (lambda x: x + 1, [True]),
    "a literal": (lambda x: (x * x.shape[0], x + 1), [False, True]),
    "an array": (lambda x: (x + np.arange(x.shape[0]), x), [False, True]),
    "in a loop": (lambda x: lax.scan(lambda c, _: (c + x.shape[0], c), x, None, 2), [False, False]),
    "another equation": (lambda x: x + 1 if x.shape[0] > 4 else x - 1, ["equation"]),
    "other operands": (lambda x, y: x + y if x.shape[0] > 4 else y + x, ["operands"]),
    "more equations": (lambda x: x + 1 if x.shape[0] > 4 else x + 1 + 1, ["length"]),
    "another result": (lambda x, y: (x, y) if x.shape[0] > 4 else (y, x), ["results"] * 2),
    "a refusal": (lambda x: (x @ x, x + 1), ["refused", True]),
}


@pytest.mark.parametrize("name", SIZED)
def test_two_traces_are_walked_together(name):
    fn, expected = SIZED[name]
    two = [jax.make_jaxpr(fn)(*[jnp.ones(size)] * fn.__code__.co_argcount) for size in (4, 8)]
    assert walk(tuple(two), [True] * fn.__code__.co_argcount, Sizes()) == expected
