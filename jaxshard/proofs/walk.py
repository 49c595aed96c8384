"""Propagate facts from the inputs of a jaxpr to its results: an abstract interpreter.

A `Domain` defines the facts and the rules by which an equation turns facts about its operands into facts about its
results. The walk handles every equation that contains a jaxpr: calls, `jax.checkpoint`, custom derivatives, `scan`,
`while`, `cond` and `shard_map`. For example, let a fact be the set of inputs on which a value depends:

    def fn(x, y, z):                                      facts          {x}  {y}  {z}
        c = lax.cond(x > 0, lambda: y, lambda: 2 * y)     c              {x, y}    the branch depends on x
        _, out = lax.scan(lambda c, z: (c + z, c), c, z)  out            {x, y, z} from the second iteration on c has z

The facts about a loop's carry are joined until a fixpoint is reached: they then hold before every iteration. Facts must
be hashable, and repeated joins must reach a fixpoint.

A single trace can't show whether a literal such as 24 is a constant or the size of an array. So two traces of one
function, on inputs of different shapes, may be walked together: every `Place` has an equation of each, and every value
of the program is read in both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.proofs.alike import Difference, first_difference

Fact = TypeVar("Fact", bound=Hashable)


class Around(NamedTuple):
    """An equation, such as a `cond` or a call, that contains the equation that the walk is at.

    Attributes:
      equation: the containing equation.
      choice: the fact about the predicate of a `cond` or `while`; None for an equation that always runs its body.
    """

    equation: Any
    choice: Any = None


class Place(NamedTuple):
    """The position of the walk in a jaxpr: an equation, and the equations whose bodies contain it.

    Attributes:
      equations: the equation; two if two traces of a function are walked together. () at the results of a program.
      around: the equations that contain it, such as a `scan`, the outermost first.
      settled: False while the body of a loop is walked repeatedly, until the facts about its carry no longer change.
    """

    equations: tuple[Any, ...]
    around: tuple[Around, ...] = ()
    settled: bool = True

    @property
    def equation(self) -> Any:
        """Return the equation in the first trace; None at the results of a program."""
        return self.equations[0] if self.equations else None

    @property
    def twin(self) -> Any:
        """Return the same equation in the second trace, if two are walked together; else the equation itself."""
        return self.equations[-1] if self.equations else None

    @property
    def name(self) -> str:
        """Return the name of the equation's primitive."""
        return str(self.equation.primitive.name)

    def parameter(self, name: str) -> tuple[Any, ...]:
        """Return the values of a parameter of the equation, such as "jaxpr": one for each trace."""
        return tuple(one.params[name] for one in self.equations)

    def joined(self, fact: Fact) -> list[Fact]:
        """Return a list with the same fact for every result of the equation."""
        return [fact] * len(self.equation.outvars)


class Refused(Exception):
    """Raised by a method of a `Domain` that can't claim anything about the results of an equation."""


class Domain(Generic[Fact]):
    """The facts that `walk` propagates through a jaxpr, and the rules by which equations change them.

    A fact is a hashable claim about one value of the program, such as the set of inputs on which the value depends. A
    subclass defines `value`, `join` and `rule`. The other methods have defaults, which fit facts of this kind.
    """

    def value(self, values: Sequence[Any], place: Place) -> Fact:
        """Return the fact about a constant: a literal, or an array that the traced function captured.

        Args:
          values: the number or array in each trace; one value if only one program is walked.
          place: the equation that reads it.
        """
        raise NotImplementedError

    def join(self, place: Place, facts: Sequence[Fact]) -> Fact:
        """Return a fact that is true whichever of `facts` holds, as for the results of the branches of a `cond`."""
        raise NotImplementedError

    def rule(self, place: Place, facts: list[Fact]) -> list[Fact] | None:
        """Return the facts about the results of an equation, given the facts about its operands.

        The walk calls this method for all equations except calls, branches and loops, whose bodies it walks through.
        Return None if the domain has no rule for the primitive. After None for a `shard_map` the walk goes through its
        body, too.
        """
        raise NotImplementedError

    def unknown(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of a primitive without a rule: by default all operands' facts, joined."""
        return place.joined(self.join(place, facts))

    def enter(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Turn facts about the operands of a call, loop or `shard_map` into facts about the inputs of its body.

        By default they are the same facts. But the body of a `scan` gets only one row of each scanned array, and the
        body of a `shard_map` one shard of each operand.
        """
        return facts

    def leave(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Turn facts about the results of the body of a `scan` or `shard_map` into facts about its own results.

        By default they are the same facts. But a `scan` stacks what its iterations return, and a `shard_map` assembles
        global arrays from shards.
        """
        return facts

    def choose(self, place: Place, choice: Fact, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of a `cond` or `while`, given the fact `choice` about its predicate.

        By default the fact about each result is joined with `choice`.
        """
        return [self.join(place, [choice, fact]) for fact in facts]

    def conclude(self, place: Place, operands: list[Fact], results: list[Fact]) -> list[Fact]:
        """Return the final facts about the results of an equation; by default `results`.

        It is called last for every equation that is not refused, so override it to record equations. If
        `place.settled`, the facts hold in every iteration of the loops around the equation. An equation in a body that
        two calls share is concluded for each call.
        """
        return results

    def refused(self, place: Place, facts: list[Fact], refusal: Refused) -> list[Fact]:
        """Return the facts about an equation's results after a method raised `Refused`; by default raise it again.

        Args:
          place: the equation.
          facts: the facts about its operands.
          refusal: the exception.
        """
        raise refusal

    def same(self, place: Place) -> bool:
        """Return whether the two equations at `place`, one in each trace, are the same.

        The walk has already compared their primitives and operands; compare their parameters here. By default they are
        the same.
        """
        return True

    def differ(self, place: Place, difference: Difference, results: Sequence[tuple[Any, Any]]) -> list[Fact]:
        """Return the facts about the results of a program whose two traces differ.

        Args:
          place: the equations at which they differ.
          difference: the first difference between the traces.
          results: for each result its variables in both traces.
        """
        raise NotImplementedError


def walk(program: Any, facts: Sequence[Fact], domain: Domain[Fact], *, around: tuple[Around, ...] = ()) -> list[Fact]:
    """Propagate facts through a jaxpr: return a fact about each result, given a fact about each input.

    Args:
      program: a jaxpr, closed or not, such as `jax.make_jaxpr(fn)(*args)`; or a tuple of two traces of one function, to
        walk them together.
      facts: one fact for each of its flat inputs.
      domain: the kind of facts, and the rules by which equations change them.
      around: the equations that contain the program, if it is the body of one.

    Example:
        class Reach(Domain[frozenset[str]]):                      # on which inputs a value depends
            def value(self, values, place):
                return frozenset()

            def join(self, place, facts):
                return frozenset().union(*facts)

            def rule(self, place, facts):
                return None

        walk(jax.make_jaxpr(fn)(x, y), [frozenset("x"), frozenset("y")], Reach())
    """
    programs = program if isinstance(program, tuple) else (program,)
    return _Walker(domain).program(programs, facts, around, settled=True)


def walk_equation(equation: Any, facts: Sequence[Fact], domain: Domain[Fact]) -> list[Fact]:
    """Return a fact about each result of a single equation, given a fact about each of its operands."""
    return _Walker(domain).equation(Place((equation,)), list(facts))


class _Walker(Generic[Fact]):
    def __init__(self, domain: Domain[Fact]):
        self.domain = domain
        # Results of programs, by their ids, facts and places. A loop walks its program until the fixpoint, so without
        # this cache nested loops take exponentially many walks. The programs are kept alive, so that ids stay unique.
        self.seen: dict[Any, tuple[Any, list[Fact]]] = {}

    def program(
        self, programs: tuple[Any, ...], facts: Sequence[Fact], around: tuple[Around, ...], *, settled: bool
    ) -> list[Fact]:
        """Return the facts about the results of a jaxpr, or of two traces of it.

        If the body of a loop is walked repeatedly (`settled=False`), reuse the results of an earlier walk with the same
        facts.
        """
        key = tuple(map(id, programs)), tuple(facts), tuple((id(one.equation), one.choice) for one in around)
        if not settled and key in self.seen:
            return self.seen[key][1]
        results = self.run(programs, facts, around, settled)
        self.seen[key] = programs, results
        return results

    def run(
        self, programs: tuple[Any, ...], facts: Sequence[Fact], around: tuple[Around, ...], settled: bool
    ) -> list[Fact]:
        jaxprs, consts = zip(*map(open_jaxpr, programs), strict=True)
        outs = list(zip(*(jaxpr.outvars for jaxpr in jaxprs), strict=False))

        def is_same(*equations: Any) -> bool:
            return self.domain.same(Place(equations, around, settled))

        if len(jaxprs) == 2 and (difference := first_difference(*jaxprs, is_same)):
            return self.domain.differ(Place(difference.equations, around, settled), difference, outs)
        values = dict(zip(jaxprs[0].constvars, zip(*consts, strict=True)))
        known: dict[Any, Fact] = dict(zip(jaxprs[0].invars, facts, strict=True))

        def read(atoms: tuple[Any, ...], place: Place) -> Fact:
            if isinstance(atoms[0], Literal):
                return self.domain.value([atom.val for atom in atoms], place)
            if atoms[0] not in known:
                known[atoms[0]] = self.domain.value(values[atoms[0]], place)
            return known[atoms[0]]

        for equations in zip(*(jaxpr.eqns for jaxpr in jaxprs), strict=True):
            place = Place(equations, around, settled)
            operands = [read(atoms, place) for atoms in zip(*(one.invars for one in equations), strict=True)]
            known.update(zip(equations[0].outvars, self.equation(place, operands), strict=True))
        return [read(atoms, Place((), around, settled)) for atoms in outs]

    def equation(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of an equation; if a rule raises `Refused`, the domain decides."""
        try:
            results = self.results(place, facts)
        except Refused as refusal:
            return self.domain.refused(place, facts, refusal)
        return self.domain.conclude(place, facts, results)

    def results(self, place: Place, facts: list[Fact]) -> list[Fact]:
        if place.name in CONTROL_FLOW:
            return CONTROL_FLOW[place.name](self, place, self.domain.enter(place, facts))
        if place.name in CALLS:
            return self.inside(place, place.parameter(CALLS[place.name]), self.domain.enter(place, facts))
        found = self.domain.rule(place, facts)
        if found is not None:
            return found
        if place.name == "shard_map":
            results = self.inside(place, place.parameter("jaxpr"), self.domain.enter(place, facts))
            return self.domain.leave(place, results)
        return self.unknown(place, facts)

    def inside(
        self,
        place: Place,
        programs: tuple[Any, ...],
        facts: Sequence[Fact],
        *,
        choice: Fact | None = None,
        settled: bool = True,
    ) -> list[Fact]:
        """Walk through the body of an equation, and return the facts about the results of the body.

        Args:
          place: the equation.
          programs: its body as a jaxpr, in each trace.
          facts: the facts about the inputs of the body.
          choice: the fact about the predicate that decides whether the body runs; None if it always runs.
          settled: False if the facts about a loop's carry may still change.
        """
        around = (*place.around, Around(place.equation, choice))
        return self.program(programs, facts, around, settled=settled and place.settled)

    def unknown(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of a primitive for which the domain has no rule.

        If the primitive contains a single jaxpr with as many inputs and results as itself, it counts as a call of this
        jaxpr. Otherwise the domain's method `unknown` decides, after a walk through all jaxprs that the primitive
        contains.
        """
        programs = list(zip(*(jaxprs_in_params(one.params) for one in place.equations), strict=True))
        sizes = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr, _ in (open_jaxpr(one[0]) for one in programs)]
        if sizes == [(len(facts), len(place.equation.outvars))]:
            return self.inside(place, programs[0], facts)
        for one, (inputs, _) in zip(programs, sizes, strict=True):
            self.inside(place, one, [self.domain.join(place, facts)] * inputs)
        return self.domain.unknown(place, facts)

    def join(self, place: Place, *facts: Sequence[Fact]) -> list[Fact]:
        """Join lists of facts position by position, such as the facts about the results of several branches."""
        return [one[0] if len(set(one)) == 1 else self.domain.join(place, one) for one in zip(*facts, strict=True)]

    def settle(self, place: Place, body: Callable[[list[Fact]], list[Fact]], carry: list[Fact]) -> list[Fact]:
        """Walk a loop's body until the facts about the carry no longer change: they then hold before every iteration.

        Args:
          place: the loop.
          body: returns the facts about the carry after an iteration, given the facts before.
          carry: the facts about the carry before the first iteration.
        """
        while (joined := self.join(place, carry, body(carry))) != carry:
            carry = joined
        return carry


def _cond(walker: _Walker[Any], place: Place, facts: list[Any]) -> list[Any]:
    choice, *operands = facts
    branches = zip(*place.parameter("branches"), strict=True)
    ways = [walker.inside(place, one, operands, choice=choice) for one in branches]
    return walker.domain.choose(place, choice, walker.join(place, *ways))


def _while(walker: _Walker[Any], place: Place, facts: list[Any]) -> list[Any]:
    in_test, in_body = place.equation.params["cond_nconsts"], place.equation.params["body_nconsts"]
    of_test, of_body, carry = facts[:in_test], facts[in_test : in_test + in_body], facts[in_test + in_body :]
    test, body = place.parameter("cond_jaxpr"), place.parameter("body_jaxpr")
    carry = walker.settle(place, lambda carry: walker.inside(place, body, [*of_body, *carry], settled=False), carry)
    # The fact about the test, which decides how often both jaxprs run, is known only now.
    (choice,) = walker.inside(place, test, [*of_test, *carry], settled=False)
    results = walker.domain.choose(place, choice, carry)
    walker.inside(place, test, [*of_test, *carry], choice=choice)
    walker.inside(place, body, [*of_body, *carry], choice=choice)
    return results


def _scan(walker: _Walker[Any], place: Place, facts: list[Any]) -> list[Any]:
    in_consts, in_carry = scan_counts(place.equation.params)
    consts, carry, rows = facts[:in_consts], facts[in_consts:][:in_carry], facts[in_consts + in_carry :]

    def iterate(carry: list[Any], *, settled: bool) -> list[Any]:
        return walker.inside(place, place.parameter("jaxpr"), [*consts, *carry, *rows], settled=settled)

    carry = walker.settle(place, lambda carry: iterate(carry, settled=False)[:in_carry], carry)
    # Only now do the facts hold in every iteration; those of earlier walks may claim too much.
    return walker.domain.leave(place, [*carry, *iterate(carry, settled=True)[in_carry:]])


CONTROL_FLOW: dict[str, Callable[[_Walker[Any], Place, list[Any]], list[Any]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
"""Equations whose jaxprs run any number of times, or only if a predicate says so."""
