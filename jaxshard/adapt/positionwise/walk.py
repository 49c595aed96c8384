"""The domain of the proof that a loss treats positions independently, for the walk of `proofs/walk.py`.

The walk goes through two traces of the loss together. `facts.py` says what is known about a value, and `rules.py` has
the rule of each primitive. A refused equation is recorded as a finding, and the walk continues with a guess, so that
all such equations are found at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxshard.adapt.positionwise.backward import fact_of_cotangent, fits, is_custom_vjp, is_float, trace_backward
from jaxshard.adapt.positionwise.facts import (
    LOST,
    ODD,
    SAME,
    Fact,
    Kind,
    Mixes,
    guess,
    is_consistent,
    same_positions,
)
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.report import FIXES, Cause, Finding, make_finding
from jaxshard.adapt.positionwise.rules import apply_rule
from jaxshard.adapt.positionwise.shares import is_share, number, refuse, sum_of
from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import eliminate_dead_code, open_jaxpr
from jaxshard.core.keys import words_of
from jaxshard.proofs.alike import Difference
from jaxshard.proofs.walk import Around, Domain, Place, Refused, walk


@dataclass
class Positions(Domain[Fact]):
    """The proof that a loss treats sequence positions independently, as a domain of `proofs/walk.py`.

    The walk goes through two traces of the loss, and asks this class how the results of each equation depend on the
    positions (a fact). Equations that mix positions are refused and recorded as findings.

    Attributes:
      length: the number of all positions.
      parts: the number of devices that split the positions.
      axes: the mesh axes that split the positions.
      findings: the refused equations so far; filled by the walk.
    """

    length: int
    parts: int
    axes: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    def walk(self, one: Any, two: Any, facts: Sequence[Fact], around: tuple[Around, ...] = ()) -> list[Fact]:
        """Return how the results of a loss depend on the sequence positions, as a fact for each result.

        Args:
          one: the closed jaxpr for all positions.
          two: the closed jaxpr of the same function for one device's positions.
          facts: how each input depends on the positions.
          around: the equations that contain these jaxprs, the outermost first.
        """
        (jaxpr, used), (other, other_used) = eliminate_dead_code(one), eliminate_dead_code(two)
        if used != other_used:
            return walk((one, two), facts, self, around=around)
        programs = ClosedJaxpr(jaxpr, open_jaxpr(one)[1]), ClosedJaxpr(other, open_jaxpr(two)[1])
        return walk(programs, [fact for fact, keep in zip(facts, used, strict=True) if keep], self, around=around)

    def pair(self, place: Place) -> Pair:
        """Return the equation at a place as a `Pair`: as traced for all positions, and for one device's positions."""
        return Pair(place.equation, place.twin, self.length, self.parts, self.axes)

    def value(self, values: Sequence[Any], place: Place) -> Fact:
        """Return the fact about a literal or constant: how it depends on the number of positions.

        Args:
          values: the values of the constant in the traces for all positions and for one device's positions.
          place: the equation that reads it.
        """
        one, other = values
        if one is other and (np.ndim(one) or isinstance(one, jax.core.Tracer)):
            return SAME
        if np.shape(one) == np.shape(other):
            return number(words_of(one), words_of(other), self.parts)
        if place.equations:
            what = "takes a constant with as many entries as there are positions"
            self.note(place._replace(equations=(place.equation,)), Mixes(what, "positions"))
        return self.guess(np.shape(one), np.shape(other))

    def rule(self, place: Place, facts: list[Fact]) -> list[Fact] | None:
        """Return how the results of an equation depend on the positions, given how its operands do.

        The equation contains no jaxpr, except for a `shard_map`: return None for it, so that the walk enters its jaxpr.
        """
        if place.name == "shard_map":
            return None
        if any(fact.kind is Kind.LOST for fact in facts):
            return self.after_refusal(place, facts)
        return [self._with_cause(fact, place) for fact in apply_rule(self.pair(place), facts)]

    def refused(self, place: Place, facts: list[Fact], refusal: Refused) -> list[Fact]:
        """Record an equation that its rule refused, and guess how its results depend on positions, to continue."""
        assert isinstance(refusal, Mixes)
        self.note(place, refusal)
        return self.after_refusal(place, facts)

    def after_refusal(self, place: Place, facts: Sequence[Fact]) -> list[Fact]:
        """Guess how each result of a refused equation depends on positions, from its shapes, to continue the walk."""
        pair = self.pair(place)
        return [self.guess(*pair.out_shapes(index)) for index in range(len(place.equation.outvars))]

    def guess(self, one: Sequence[int], two: Sequence[int]) -> Fact:
        """Guess how a value depends on positions from its shapes, to continue after a refused equation.

        `one` is its shape in the trace for all positions, `two` in the trace for one device's positions.
        """
        return guess(one, two, self.parts)

    def _with_cause(self, fact: Fact, place: Place) -> Fact:
        """Set the equation at `place` as the `cause` of a fact of kind SUM or MAX, and return the fact.

        A fact that already has a cause keeps it, and all other facts are returned as they are. Error messages name the
        cause.
        """
        if math.isnan(fact.degree):
            # Facts are compared, and NaN != NaN, but tuples compare identical objects as equal: use one NaN object.
            fact = fact._replace(degree=ODD)
        new = is_share(fact) and fact.cause is None
        return fact._replace(cause=Cause(self.pair(place), _calls(place))) if new else fact

    def note(self, place: Place, refusal: Mixes) -> None:
        """Add a refused equation to the findings, unless its source line already has a finding with the same fix."""
        if place.settled:
            finding = make_finding(self.pair(place), refusal, _calls(place))
            if all((finding.where, finding.fix) != (known.where, known.fix) for known in self.findings):
                self.findings.append(finding)  # one per line and fix: a single softmax has two refused equations

    def join(self, place: Place, facts: Sequence[Fact]) -> Fact:
        """Return how a value depends on the positions if it may come from several cases, as from a `cond`'s branches.

        `facts` has the fact for each case. If they can't be joined, add a finding and return LOST (unknown).
        """
        first, *others = facts
        for other in others:
            first = self._join(place, first, other)
        return first

    def _join(self, place: Place, one: Fact, two: Fact) -> Fact:
        if one == two:
            return one
        if Kind.LOST in (one.kind, two.kind):
            return LOST
        try:
            if is_share(one) or is_share(two):
                return sum_of(self.pair(place), [one, two])
            if one.kind is two.kind is Kind.ALONG:
                return same_positions([one, two])
            if one.kind is two.kind is Kind.SAME:
                return SAME._replace(degree=one.degree if one.degree == two.degree else ODD)
        except Mixes as refusal:
            self.note(place, refusal)
            return LOST
        self.note(place, Mixes("has branches or iterations that treat positions differently"))
        return LOST

    def choose(self, place: Place, choice: Fact, facts: list[Fact]) -> list[Fact]:
        """Check the condition of a branch or loop, and return the facts about its results unchanged.

        Args:
          place: the equation of the branch or loop.
          choice: the fact about the condition or branch index.
          facts: the facts about the results.

        Raises:
          Mixes: the condition or index depends on the positions.
        """
        if is_share(choice):
            raise refuse(self.pair(place), choice, "which branch runs depends on it")
        if choice.kind is Kind.ALONG:
            raise Mixes("chooses a branch or ends a loop by the values of positions")
        if choice.degree:
            raise Mixes("chooses a branch or ends a loop by the number of positions", "number")
        return facts

    def enter(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return how the inputs of the jaxpr of a call, branch, loop or `shard_map` depend on the positions.

        `facts` has the fact about each operand of the equation. Inputs have the facts of the operands, except in a
        scan, whose body receives one row of each scanned array.

        Raises:
          Mixes: a scan over the positions, a condition that depends on them, or a `shard_map` that splits them.
        """
        self.pair(place).check_unchanged(_PROGRAM_PARAMS)
        if place.name == "cond":
            self.choose(place, facts[0], [])
        if place.name == "shard_map":
            _check_split(facts, place.equation.params["in_specs"])
        if place.name != "scan":
            return facts
        kept = sum(scan_counts(place.equation.params))
        over = facts[kept:]
        if place.equation.params["length"] != place.twin.params["length"] or any(map(_leads, over)):
            raise Mixes("goes over the positions one after the other")
        return [*facts[:kept], *(_shift(fact, -1) for fact in over)]

    def leave(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return how the results of a scan or `shard_map` depend on the positions.

        `facts` has the fact about each result of the inner jaxpr. The results of the equation have the same facts,
        except in a scan, which stacks a row of each iteration along a new first dimension.
        """
        if place.name == "shard_map":
            _check_split(facts, place.equation.params["out_specs"])
            return facts
        _, carries = scan_counts(place.equation.params)
        return [*facts[:carries], *(_shift(fact, 1) for fact in facts[carries:])]

    def conclude(self, place: Place, operands: list[Fact], results: list[Fact]) -> list[Fact]:
        """Return the facts about an equation's results, or LOST (unknown) for all if a shape contradicts its fact.

        For a `jax.custom_vjp`, check its backward pass too, unless another `jax.custom_vjp` calls it, because JAX then
        never runs this backward pass.

        Args:
          place: the equation.
          operands: how its operands depend on the positions.
          results: how its results depend on the positions.
        """
        if place.settled and is_custom_vjp(place.equation) and not any(is_custom_vjp(one) for one in _calls(place)):
            self.check_backward(place, operands, results)
        pair = self.pair(place)
        for index, fact in enumerate(results):
            if not is_consistent(fact, *pair.out_shapes(index), self.parts, self.length):
                if not self.findings:  # else an earlier finding explains it: tokens[:, 1:] makes many such shapes
                    what = "makes an array whose shape depends on the number of positions"
                    self.note(place, Mixes(what, "positions"))
                return place.joined(LOST)
        return results

    def check_backward(self, place: Place, facts: list[Fact], results: list[Fact]) -> None:
        """Add a finding for each equation in the backward pass of a `jax.custom_vjp` that mixes sequence positions.

        Args:
          place: the call of the `jax.custom_vjp`.
          facts: how its operands depend on the positions.
          results: how its results depend on the positions.
        """
        lost = any(fact.kind is Kind.LOST for fact in (*facts, *results))
        if lost or all(fact.kind is Kind.SAME for fact in facts):
            return
        outs = zip(results, place.equation.outvars, strict=True)
        cotangents = [fact_of_cotangent(fact) for fact, x in outs if is_float(x.aval.dtype)]
        before = len(self.findings)
        one, two = map(trace_backward, place.equations)
        gradients = self.walk(one, two, [*facts, *cotangents], (*place.around, Around(place.equation)))
        where = "in the backward pass of a jax.custom_vjp"
        self.findings[before:] = [one._replace(what=f"{where} {one.what}") for one in self.findings[before:]]
        operands = [fact for fact, x in zip(facts, place.equation.invars, strict=True) if is_float(x.aval.dtype)]
        if len(self.findings) == before and not all(map(fits, operands, gradients)):
            self.note(place, Mixes("has a backward pass that is not right on a part of the positions"))

    def differ(self, place: Place, difference: Difference, results: Sequence[tuple[Any, Any]]) -> list[Fact]:
        """Add a finding for the first difference between the two traces, and guess how the results depend on positions.

        Args:
          place: where the traces differ, or the equations around this place.
          difference: how they differ, such as in the equation or its operands.
          results: the variables of each result, in both traces.
        """
        cut = next((eqn for eqn in place.equations if eqn.primitive.name in _SLICES), None)
        if difference.what == "equation" and cut is not None:
            # With a table as long as a row, table[:T] is a slice only in the trace on a part of the positions.
            what, fix, place = "takes as much of an array as there are positions", "positions", _only(place, cut)
        else:
            what, fix = _DIFFERENT[difference.what], "choice"
            if difference.what == "equation":
                what = what.format(place.twin.primitive.name)
            if not place.equations and place.around:
                place = _only(place, place.around[-1].equation)
        if place.equations:
            self.note(place, Mixes(f"{what}: what runs depends on how many there are", fix))
        else:
            self.findings.append(Finding("the loss", what, "the loss", "", "", FIXES[fix]))
        return [self.guess(a.aval.shape, b.aval.shape) for a, b in results]


def _calls(place: Place) -> tuple[Any, ...]:
    """Return the equations whose jaxprs contain the equation at this place, the outermost first."""
    return tuple(one.equation for one in place.around)


def _only(place: Place, equation: Any) -> Place:
    return place._replace(equations=(equation,))


def _leads(fact: Fact) -> bool:
    return fact.kind is Kind.ALONG and fact.dim == 0


def _shift(fact: Fact, by: int) -> Fact:
    return fact._replace(dim=fact.dim + by) if fact.kind is Kind.ALONG else fact


def _check_split(facts: Sequence[Fact], specs: Sequence[Any]) -> None:
    """Raise `Mixes` if a `shard_map` in the user's code splits a dimension that has the sequence positions.

    `facts` says in which dimension each array has positions; `specs` has the PartitionSpec of each array.
    """
    for fact, spec in zip(facts, specs, strict=True):
        if fact.kind is Kind.ALONG and len(spec) > fact.dim and spec[fact.dim] is not None:
            raise Mixes("splits the positions itself")


_DIFFERENT = {
    "inputs": "takes another value on a part of the positions",
    "equation": "is {} on a part of the positions",
    "operands": "takes another value on a part of the positions",
    "length": "runs only for some numbers of positions",
    "results": "returns another value on a part of the positions",
}
"""{kind of difference between both traces: the predicate of a sentence about the equation}."""

_SLICES = frozenset({"slice", "dynamic_slice"})

_PROGRAM_PARAMS = frozenset(
    {"num_consts", "num_carry", "reverse", "cond_nconsts", "body_nconsts", "in_specs", "out_specs"}
)
"""Parameters of control flow that determine how operands become inputs of the inner jaxprs."""
