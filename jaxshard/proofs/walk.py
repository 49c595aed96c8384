"""Propagate facts from the inputs of a jaxpr to its results: an abstract interpreter.

A `Domain` defines the facts and the rules by which an equation turns facts about its operands into facts about its
results. The walk handles every equation that contains a jaxpr: calls, `jax.checkpoint`, custom derivatives, `scan`,
`while`, `cond` and `shard_map`. For example, let a fact be the set of inputs on which a value depends:

    def fn(x, y, z):                                      facts          {x}  {y}  {z}
        c = lax.cond(x > 0, lambda: y, lambda: 2 * y)     c              {x, y}    the branch depends on x
        _, out = lax.scan(lambda c, z: (c + z, c), c, z)  out            {x, y, z} from the second iteration on c has z

The facts about a loop's carry are joined until a fixpoint is reached: they then hold before every iteration. Facts must
be hashable, and repeated joins must reach a fixpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr

Fact = TypeVar("Fact", bound=Hashable)


class Around(NamedTuple):
    """An equation, such as a `cond`, whose inner jaxpr contains the equation of a `Place`.

    Attributes:
      equation: the containing equation.
      choice: the fact about the predicate of a `cond` or `while`; None for an equation that always runs its jaxpr.
    """

    equation: Any
    choice: Any = None


class Place(NamedTuple):
    """An equation and the equations that contain it.

    Attributes:
      equation: the equation.
      around: the equations that contain it, the outermost first.
    """

    equation: Any
    around: tuple[Around, ...]

    @property
    def name(self) -> str:
        """Return the name of the equation's primitive."""
        return str(self.equation.primitive.name)

    def joined(self, fact: Fact) -> list[Fact]:
        """Return a list with `fact` for every result of the equation."""
        return [fact] * len(self.equation.outvars)


def _unchanged(place: Place, facts: list[Any]) -> list[Any]:
    return facts


@dataclass(frozen=True)
class Domain(Generic[Fact]):
    """A kind of facts, and the rules by which equations change them (the transfer functions).

    Attributes:
      literal: returns the fact about a literal of the jaxpr.
      constant: returns the fact about an array that the traced function closed over.
      join: combines several facts, any of which may hold for a value.
      rule: returns the facts about the results of an equation from the facts about its operands. It returns None for
        control flow and calls, whose programs the walk follows, and for primitives that the domain does not know.
      choose: combines the fact about the predicate of a `cond` or `while` with the fact about one of its results. By
        default they are joined.
      unknown: returns the facts about the results of a primitive that the domain does not know. By default the facts
        about all operands are joined.
      enter: turns the facts about the operands of a `scan` or `shard_map` into facts about the inputs of its jaxpr (one
        row, one shard).
      leave: turns the facts about the results of that jaxpr into facts about the results of the equation.
    """

    literal: Callable[[Any], Fact]
    constant: Callable[[Any], Fact]
    join: Callable[[Sequence[Fact]], Fact]
    rule: Callable[[Place, list[Fact]], list[Fact] | None]
    choose: Callable[[Fact, Fact], Fact] | None = None
    unknown: Callable[[Place, list[Fact]], list[Fact]] | None = None
    enter: Callable[[Place, list[Fact]], list[Fact]] = _unchanged
    leave: Callable[[Place, list[Fact]], list[Fact]] = _unchanged


Visit = Callable[[Place, list[Any]], None]
"""`visit(place, facts of its operands)`, called for every equation with its final facts."""


def walk(program: Any, facts: Sequence[Fact], domain: Domain[Fact], visit: Visit | None = None) -> list[Fact]:
    """Propagate facts from the inputs of a jaxpr to its results; return the facts about the results.

    Args:
      program: a jaxpr, closed or not, such as `jax.make_jaxpr(fn)(*args)`.
      facts: one fact for each of its flat inputs.
      domain: the kind of facts.
      visit: called for every equation, those of inner jaxprs included, with facts that hold in every iteration of the
        loops around it. A jaxpr that several equations call is visited once for each call.

    Example:
        union = Domain(lambda value: NONE, lambda value: NONE, lambda facts: NONE.union(*facts), lambda *_: None)
        walk(jax.make_jaxpr(fn)(x, y), [frozenset("x"), frozenset("y")], union)
    """
    return _Walker(domain).program(program, facts, (), visit)


class _Walker(Generic[Fact]):
    def __init__(self, domain: Domain[Fact]):
        self.domain = domain
        # Results of programs, by their ids, facts and places. A loop walks its program until the fixpoint, so without
        # this cache nested loops take exponentially many walks. The programs are kept alive, so that ids stay unique.
        self.seen: dict[Any, tuple[Any, list[Fact]]] = {}

    def program(
        self, program: Any, facts: Sequence[Fact], around: tuple[Around, ...], visit: Visit | None
    ) -> list[Fact]:
        """Return the facts about the results of a program that the equations `around` contain."""
        key = id(program), tuple(facts), tuple((id(one.equation), one.choice) for one in around)
        if visit is None and key in self.seen:
            return self.seen[key][1]
        jaxpr, consts = open_jaxpr(program)
        known: dict[Any, Fact] = {}
        if consts:
            known.update(zip(jaxpr.constvars, map(self.domain.constant, consts), strict=True))
        known.update(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> Fact:
            return self.domain.literal(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            place, operands = Place(equation, around), [read(atom) for atom in equation.invars]
            if visit is not None:
                visit(place, operands)
            known.update(zip(equation.outvars, self.equation(place, operands, visit), strict=True))
        results = [read(atom) for atom in jaxpr.outvars]
        self.seen[key] = program, results
        return results

    def equation(self, place: Place, facts: list[Fact], visit: Visit | None) -> list[Fact]:
        """Return the facts about the results of an equation."""
        found = self.domain.rule(place, facts)
        if found is not None:
            return found
        if place.name in _CONTROL_FLOW:
            return _CONTROL_FLOW[place.name](self, place, facts, visit)
        if place.name in CALLS:
            return self.inside(place, place.equation.params[CALLS[place.name]], facts, visit)
        return self.unknown(place, facts, visit)

    def inside(
        self, place: Place, program: Any, facts: Sequence[Fact], visit: Visit | None, choice: Fact | None = None
    ) -> list[Fact]:
        return self.program(program, facts, (*place.around, Around(place.equation, choice)), visit)

    def unknown(self, place: Place, facts: list[Fact], visit: Visit | None) -> list[Fact]:
        """Handle a primitive that the domain does not know.

        A primitive that contains one jaxpr, with as many inputs and results as the primitive has, is taken for a call.
        """
        programs = list(jaxprs_in_params(place.equation.params))
        sizes = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr, _ in map(open_jaxpr, programs)]
        if sizes == [(len(facts), len(place.equation.outvars))]:
            return self.inside(place, programs[0], facts, visit)
        if visit is not None:
            for program, (inputs, _) in zip(programs, sizes, strict=True):
                self.inside(place, program, [self.domain.join(facts)] * inputs, visit)
        unknown = self.domain.unknown
        return place.joined(self.domain.join(facts)) if unknown is None else unknown(place, facts)

    def join(self, *facts: Sequence[Fact]) -> list[Fact]:
        """Join lists of facts elementwise."""
        return [one[0] if len(set(one)) == 1 else self.domain.join(one) for one in zip(*facts, strict=True)]

    def choose(self, choice: Fact, results: list[Fact]) -> list[Fact]:
        """Combine the facts about results with the fact about the predicate on which they depend."""
        choose = self.domain.choose
        return [self.domain.join([choice, one]) if choose is None else choose(choice, one) for one in results]

    def settle(self, body: Callable[[list[Fact]], list[Fact]], carry: list[Fact]) -> list[Fact]:
        """Return the fixpoint of a loop's carry: facts that hold before every iteration."""
        while (joined := self.join(carry, body(carry))) != carry:
            carry = joined
        return carry


def _cond(walker: _Walker[Any], place: Place, facts: list[Any], visit: Visit | None) -> list[Any]:
    choice, *operands = facts
    ways = [walker.inside(place, one, operands, visit, choice) for one in place.equation.params["branches"]]
    return walker.choose(choice, walker.join(*ways))


def _while(walker: _Walker[Any], place: Place, facts: list[Any], visit: Visit | None) -> list[Any]:
    params = place.equation.params
    in_test, in_body = params["cond_nconsts"], params["body_nconsts"]
    test, body, carry = facts[:in_test], facts[in_test : in_test + in_body], facts[in_test + in_body :]

    def iterate(carry: list[Any], visit: Visit | None = None, choice: Any = None) -> list[Any]:
        return walker.inside(place, params["body_jaxpr"], [*body, *carry], visit, choice)

    carry = walker.settle(iterate, carry)
    # Visit both jaxprs with the fact about the test, which decides how often they run and is known only now.
    (choice,) = walker.inside(place, params["cond_jaxpr"], [*test, *carry], None)
    if visit is not None:
        walker.inside(place, params["cond_jaxpr"], [*test, *carry], visit, choice)
        iterate(carry, visit, choice)
    return walker.choose(choice, carry)


def _scan(walker: _Walker[Any], place: Place, facts: list[Any], visit: Visit | None) -> list[Any]:
    in_consts, in_carry = scan_counts(place.equation.params)
    entered = walker.domain.enter(place, facts)
    consts, carry, rows = entered[:in_consts], entered[in_consts:][:in_carry], entered[in_consts + in_carry :]

    def iterate(carry: list[Any], visit: Visit | None = None) -> list[Any]:
        return walker.inside(place, place.equation.params["jaxpr"], [*consts, *carry, *rows], visit)

    # Visit the body only after the fixpoint: facts of earlier iterations may claim too much.
    carry = walker.settle(lambda carry: iterate(carry)[:in_carry], carry)
    return walker.domain.leave(place, [*carry, *iterate(carry, visit)[in_carry:]])


def _shard_map(walker: _Walker[Any], place: Place, facts: list[Any], visit: Visit | None) -> list[Any]:
    entered = walker.domain.enter(place, facts)
    return walker.domain.leave(place, walker.inside(place, place.equation.params["jaxpr"], entered, visit))


_CONTROL_FLOW: dict[str, Callable[[_Walker[Any], Place, list[Any], Visit | None], list[Any]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _shard_map,
}
