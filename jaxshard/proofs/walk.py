"""Facts about the values of a traced program, carried from its inputs to its results (an abstract interpreter).

A `Domain` says what a fact is and what an equation makes of the facts about its operands; the walk handles everything
that runs a program inside: calls, checkpoints, functions with derivatives of their own, `scan`, `while`, `cond` and
`shard_map`. For a domain whose facts are sets of inputs, "which inputs reach this value":

    def fn(x, y, z):                                      facts          {x}  {y}  {z}
        c = lax.cond(x > 0, lambda: y, lambda: 2 * y)     c              {x, y}    the branch depends on x
        _, out = lax.scan(lambda c, z: (c + z, c), c, z)  out            {x, y, z} before the second iteration c has z

Facts about what a loop carries are joined until they hold before every iteration. They have to be hashable, and joining
must come to an end.
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
    """An equation whose inner program contains another equation.

    Attributes:
      equation: the equation with the program.
      choice: the fact about the value that decides which branch of a `cond`, or how many iterations of a `while`, run;
        None for equations that run their program anyway.
    """

    equation: Any
    choice: Any = None


class Place(NamedTuple):
    """An equation and where it stands.

    Attributes:
      equation: the equation.
      around: the equations whose programs it is in, the outermost first.
    """

    equation: Any
    around: tuple[Around, ...]

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        return str(self.equation.primitive.name)

    def joined(self, fact: Fact) -> list[Fact]:
        """Return the same fact about every result."""
        return [fact] * len(self.equation.outvars)


def _unchanged(place: Place, facts: list[Any]) -> list[Any]:
    return facts


@dataclass(frozen=True)
class Domain(Generic[Fact]):
    """Facts, and what operations make of them.

    Attributes:
      literal: the fact about a number that stands in the program.
      constant: the fact about an array that the traced function closed over.
      join: the fact about a value of which any of several facts may hold.
      rule: the facts about the results of an equation, given those about its operands; or None, for control flow and
        calls whose programs the walk is to follow, and for primitives that the domain does not know.
      choose: the fact about a result, given that about the value which decides how it comes about, by a branch or the
        number of iterations, and that about the result itself. By default they are joined.
      unknown: the facts about the results of a primitive for which there is no rule; the place where a domain says what
        that means. By default all operands are joined.
      enter: facts about the operands of a `scan` or `shard_map` as its program sees them (one row, one shard).
      leave: facts about the results of such a program as the equation returns them.
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
"""`visit(place, facts of its operands)`, called for every equation once it is known what holds there."""


def walk(program: Any, facts: Sequence[Fact], domain: Domain[Fact], visit: Visit | None = None) -> list[Fact]:
    """Return the facts about the results of a program.

    Args:
      program: a jaxpr, closed or not, such as `jax.make_jaxpr(fn)(*args)`.
      facts: one for each of its inputs, flat.
      domain: what facts mean.
      visit: called for every equation, also of inner programs, with facts that hold in every iteration of the loops
        around it. A program that several equations call is visited for each of them.

    Example:
        union = Domain(lambda value: NONE, lambda value: NONE, lambda facts: NONE.union(*facts), lambda *_: None)
        walk(jax.make_jaxpr(fn)(x, y), [frozenset("x"), frozenset("y")], union)
    """
    return _Walker(domain).program(program, facts, (), visit)


class _Walker(Generic[Fact]):
    def __init__(self, domain: Domain[Fact]):
        self.domain = domain
        # Results of programs, by their ids, facts and places. Loops walk their programs several times, and nested ones
        # would do so exponentially often. The programs are kept, so that no other one gets their ids.
        self.seen: dict[Any, tuple[Any, list[Fact]]] = {}

    def program(
        self, program: Any, facts: Sequence[Fact], around: tuple[Around, ...], visit: Visit | None
    ) -> list[Fact]:
        """Return the facts about the results of a program at some place."""
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
        """Walk a program inside an equation."""
        return self.program(program, facts, (*place.around, Around(place.equation, choice)), visit)

    def unknown(self, place: Place, facts: list[Fact], visit: Visit | None) -> list[Fact]:
        """Take a primitive with one program, of as many inputs and results as it has itself, for a call of that."""
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
        """Join lists of facts place by place."""
        return [one[0] if len(set(one)) == 1 else self.domain.join(one) for one in zip(*facts, strict=True)]

    def choose(self, choice: Fact, results: list[Fact]) -> list[Fact]:
        """Return facts about results that a choice decides."""
        choose = self.domain.choose
        return [self.domain.join([choice, one]) if choose is None else choose(choice, one) for one in results]

    def settle(self, body: Callable[[list[Fact]], list[Fact]], carry: list[Fact]) -> list[Fact]:
        """Return facts about what a loop carries that hold before every iteration."""
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
