"""Walk two traces of one program equation by equation, into calls, loops and branches.

`rules` has the rule of each primitive. A refused equation is recorded with its place, and the walk continues with a
guess, so that all places are found at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

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
from jaxshard.core.jaxpr import CALLS, eliminate_dead_code, open_jaxpr, variables
from jaxshard.core.keys import words_of


@dataclass
class Walk:
    """A walk through two traces.

    Attributes:
      length: the number of all positions.
      parts: the number of devices that split them.
      axes: the mesh axes that split them.
      findings: the refused equations so far.
      calls: the calls around the current program, the outermost first.
      silent: above 0, nothing is recorded: during the fixpoint iteration of a loop's carry.
      outer_rules: how many `jax.custom_vjp` calls are around the current program. Only the backward pass of the
        outermost is checked, since the inner ones never run.
    """

    length: int
    parts: int
    axes: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    silent: int = 0
    outer_rules: int = 0

    def closed(self, one: Any, two: Any, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts about the results of two closed jaxprs, after dead code elimination."""
        (jaxpr, used), (other, other_used) = eliminate_dead_code(one), eliminate_dead_code(two)
        kept = [needed or also for needed, also in zip(used, other_used, strict=True)]
        if used != other_used:
            jaxpr, other, kept = open_jaxpr(one)[0], open_jaxpr(two)[0], [True] * len(used)
        consts, other_consts = open_jaxpr(one)[1], open_jaxpr(two)[1]
        return self._run(jaxpr, other, consts, other_consts, [fact for fact, keep in zip(facts, kept) if keep])

    def program(self, one: Any, two: Any, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts about the results of a jaxpr, given the facts about its arguments."""
        (jaxpr, consts), (other, other_consts) = open_jaxpr(one), open_jaxpr(two)
        return self._run(jaxpr, other, consts, other_consts, facts)

    def _run(self, jaxpr: Any, other: Any, consts: Any, other_consts: Any, facts: Sequence[Fact]) -> list[Fact]:
        known: dict[Any, Fact] = dict(zip(jaxpr.invars, facts, strict=True))
        if not self._is_alike(jaxpr, other):
            return [self.guess(a.aval.shape, b.aval.shape) for a, b in zip(jaxpr.outvars, other.outvars, strict=False)]
        for var, twin, value, other_value in zip(jaxpr.constvars, other.constvars, consts, other_consts, strict=True):
            known[var] = self.constant(var, twin, value, other_value, jaxpr)
        for eqn, twin in zip(jaxpr.eqns, other.eqns, strict=True):
            pair = Pair(eqn, twin, self.length, self.parts, self.axes)
            operands = [self._read(known, a, b) for a, b in zip(eqn.invars, twin.invars, strict=True)]
            known.update(zip(eqn.outvars, self.equation(pair, operands), strict=True))
        return [self._read(known, a, b) for a, b in zip(jaxpr.outvars, other.outvars, strict=True)]

    def _is_alike(self, one: Any, two: Any) -> bool:
        """Return whether both jaxprs have the same equations on the same variables; record the first that differs."""
        twins: dict[Any, Any] = {}

        def are_twins(these: Sequence[Any], those: Sequence[Any]) -> bool:
            return len(these) == len(those) and all(
                isinstance(b, Literal) if isinstance(a, Literal) else twins.get(a) is b for a, b in zip(these, those)
            )

        def differs(eqn: Any, twin: Any, what: str, fix: str = "choice") -> bool:
            mixes = Mixes(f"{what}: what runs depends on how many there are", fix)
            self.note(Pair(eqn, twin, self.length, self.parts), mixes)
            return False

        for these, those in ((one.constvars, two.constvars), (one.invars, two.invars)):
            twins.update(zip(these, those, strict=False))
        for eqn, twin in zip(one.eqns, two.eqns, strict=False):
            if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
                # With a table as long as a row, table[:T] is a slice only in the trace on a part of the positions.
                if cut := next((one for one in (eqn, twin) if one.primitive.name in _SLICES), None):
                    return differs(cut, cut, "takes as much of an array as there are positions", "positions")
                return differs(eqn, twin, f"is {twin.primitive.name} on a part of the positions")
            if not are_twins(eqn.invars, twin.invars):
                return differs(eqn, twin, "takes another value on a part of the positions")
            twins.update(zip(eqn.outvars, twin.outvars, strict=False))
        if len(one.eqns) != len(two.eqns):
            longer = max(one.eqns, two.eqns, key=len)[min(len(one.eqns), len(two.eqns))]
            return differs(longer, longer, "runs only for some numbers of positions")
        if not are_twins(one.outvars, two.outvars):
            made = [eqn for eqn in one.eqns if set(eqn.outvars) & variables(one.outvars)] or self.calls
            if made:
                return differs(made[-1], made[-1], "is another result on a part of the positions")
            what = "returns another value on a part of the positions"
            self.findings.append(Finding("the loss", what, "the loss", "", "", FIXES["choice"]))
            return False
        return True

    def constant(self, var: Any, twin: Any, value: Any, other: Any, jaxpr: Any) -> Fact:
        """Return the fact of a constant of the jaxpr, given its values in both traces."""
        if value is other:
            return SAME
        user = next((eqn for eqn in jaxpr.eqns if var in eqn.invars), None)
        if var.aval.shape == twin.aval.shape:
            return number(words_of(value), words_of(other), self.parts)
        if user is not None:
            what = "takes a constant with as many entries as there are positions"
            self.note(Pair(user, user, self.length, self.parts), Mixes(what, "positions"))
        return self.guess(var.aval.shape, twin.aval.shape)

    def _read(self, known: dict[Any, Fact], atom: Any, twin: Any) -> Fact:
        if not isinstance(atom, Literal):
            return known.get(atom, LOST)
        return number(atom.val, twin.val, self.parts) if isinstance(twin, Literal) else LOST

    def equation(self, pair: Pair, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of an equation, given the facts about its operands."""
        shapes = [pair.out_shapes(index) for index in range(len(pair.one.outvars))]
        if pair.name in _PROGRAMS or pair.name in CALLS:
            with self._inside(pair):
                try:
                    pair.check_unchanged(_PROGRAM_PARAMS)
                    found = _PROGRAMS.get(pair.name, _call)(self, pair, facts)
                except Mixes as refusal:
                    self.note(pair, refusal)
                    return self.after_refusal(pair, facts)
        elif any(fact.kind is Kind.LOST for fact in facts):
            return self.after_refusal(pair, facts)
        else:
            try:
                found = [self._with_cause(fact, pair) for fact in apply_rule(pair, facts)]
            except Mixes as refusal:
                self.note(pair, refusal)
                return self.after_refusal(pair, facts)
        for fact, both in zip(found, shapes, strict=True):
            if not is_consistent(fact, *both, self.parts, self.length):
                if not self.findings:  # else an earlier finding explains it: tokens[:, 1:] makes many such shapes
                    self.note(pair, Mixes("makes an array whose shape depends on the number of positions", "positions"))
                return [LOST] * len(found)
        return found

    def after_refusal(self, pair: Pair, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts with which the walk continues after a refused equation."""
        del facts
        return [self.guess(*pair.out_shapes(index)) for index in range(len(pair.one.outvars))]

    def guess(self, one: Sequence[int], two: Sequence[int]) -> Fact:
        """Guess the fact of a value from its shapes, after a refused equation."""
        return guess(one, two, self.parts)

    def _with_cause(self, fact: Fact, pair: Pair) -> Fact:
        """Record the place of an equation that makes a sum or maximum over positions."""
        if math.isnan(fact.degree):
            # Facts are compared, and NaN != NaN, but tuples compare identical objects as equal: use one NaN object.
            fact = fact._replace(degree=ODD)
        new = is_share(fact) and fact.cause is None
        return fact._replace(cause=Cause(pair, tuple(self.calls))) if new else fact

    @contextmanager
    def _inside(self, pair: Pair) -> Iterator[None]:
        self.calls.append(pair.one)
        yield
        self.calls.pop()

    def note(self, pair: Pair, refusal: Mixes) -> None:
        """Record a refused equation as a finding."""
        if not self.silent:
            finding = make_finding(pair, refusal, self.calls)
            if all((finding.where, finding.fix) != (known.where, known.fix) for known in self.findings):
                self.findings.append(finding)  # one per line and fix: a single softmax has two refused equations

    def settle(self, run: Callable[[list[Fact]], list[Fact]], carry: list[Fact], pair: Pair) -> list[Fact]:
        """Return the fixpoint of a loop's carry: facts that hold before every iteration."""
        # Every join that changes a fact weakens it, and each fact can be weakened twice at most.
        for _ in range(2 + 2 * len(carry)):
            self.silent += 1
            after = run(carry)
            self.silent -= 1
            joined = [self.join(pair, a, b) for a, b in zip(carry, after, strict=True)]
            if joined == carry:
                return carry
            carry = joined
        raise AssertionError("the joins of a loop's carry reach no fixpoint")

    def join(self, pair: Pair, one: Fact, two: Fact) -> Fact:
        """Return the fact about a value for which either of two facts holds."""
        if one == two:
            return one
        if Kind.LOST in (one.kind, two.kind):
            return LOST
        try:
            if is_share(one) or is_share(two):
                return sum_of(pair, [one, two])
            if one.kind is two.kind is Kind.ALONG:
                return same_positions([one, two])
            if one.kind is two.kind is Kind.SAME:
                return SAME._replace(degree=one.degree if one.degree == two.degree else ODD)
        except Mixes as refusal:
            self.note(pair, refusal)
            return LOST
        self.note(pair, Mixes("has branches or iterations that treat positions differently"))
        return LOST


def _call(walk: Walk, pair: Pair, facts: list[Fact]) -> list[Fact]:
    parameter = CALLS[pair.name]
    if not is_custom_vjp(pair):
        return walk.program(pair.params[parameter], pair.two.params[parameter], facts)
    walk.outer_rules += 1
    results = walk.program(pair.params[parameter], pair.two.params[parameter], facts)
    if walk.outer_rules == 1:
        _check_backward(walk, pair, facts, results)
    walk.outer_rules -= 1
    return results


def _check_backward(walk: Walk, pair: Pair, facts: list[Fact], results: list[Fact]) -> None:
    """Record equations that mix positions in the backward pass of a `jax.custom_vjp`."""
    lost = any(fact.kind is Kind.LOST for fact in (*facts, *results))
    if lost or walk.silent or all(fact.kind is Kind.SAME for fact in facts):
        return
    outs = zip(results, pair.one.outvars, strict=True)
    cotangents = [fact_of_cotangent(fact) for fact, x in outs if is_float(x.aval.dtype)]
    before = len(walk.findings)
    gradients = walk.closed(trace_backward(pair.one), trace_backward(pair.two), [*facts, *cotangents])
    where = "in the backward pass of a jax.custom_vjp"
    walk.findings[before:] = [one._replace(what=f"{where} {one.what}") for one in walk.findings[before:]]
    operands = [fact for fact, x in zip(facts, pair.one.invars, strict=True) if is_float(x.aval.dtype)]
    if len(walk.findings) == before and not all(map(fits, operands, gradients)):
        walk.note(pair, Mixes("has a backward pass that is not right on a part of the positions"))


def _scan(walk: Walk, pair: Pair, facts: list[Fact]) -> list[Fact]:
    count, carried = scan_counts(pair.params)
    consts, carry, over = facts[:count], facts[count : count + carried], facts[count + carried :]
    if pair.params["length"] != pair.two.params["length"] or any(_leads(fact) for fact in over):
        raise Mixes("goes over the positions one after the other")
    slices = [fact._replace(dim=fact.dim - 1) if fact.kind is Kind.ALONG else fact for fact in over]

    def body(carry: list[Fact]) -> list[Fact]:
        return walk.program(pair.params["jaxpr"], pair.two.params["jaxpr"], [*consts, *carry, *slices])

    carry = walk.settle(lambda carry: body(carry)[:carried], carry, pair)
    results = body(carry)
    stacked = [fact._replace(dim=fact.dim + 1) if fact.kind is Kind.ALONG else fact for fact in results[carried:]]
    return [*results[:carried], *stacked]


def _leads(fact: Fact) -> bool:
    return fact.kind is Kind.ALONG and fact.dim == 0


def _while(walk: Walk, pair: Pair, facts: list[Fact]) -> list[Fact]:
    in_test, in_body = pair.params["cond_nconsts"], pair.params["body_nconsts"]
    test, body, carry = facts[:in_test], facts[in_test : in_test + in_body], facts[in_test + in_body :]

    def step(carry: list[Fact]) -> list[Fact]:
        return walk.program(pair.params["body_jaxpr"], pair.two.params["body_jaxpr"], [*body, *carry])

    carry = walk.settle(step, carry, pair)
    (goes_on,) = walk.program(pair.params["cond_jaxpr"], pair.two.params["cond_jaxpr"], [*test, *carry])
    _check_choice(pair, goes_on)
    step(carry)
    return carry


def _cond(walk: Walk, pair: Pair, facts: list[Fact]) -> list[Fact]:
    choice, *operands = facts
    _check_choice(pair, choice)
    branches = zip(pair.params["branches"], pair.two.params["branches"], strict=True)
    first, *rest = [walk.program(one, two, operands) for one, two in branches]
    for other in rest:
        first = [walk.join(pair, a, b) for a, b in zip(first, other, strict=True)]
    return first


def _check_choice(pair: Pair, choice: Fact) -> None:
    if is_share(choice):
        raise refuse(pair, choice, "which branch runs depends on it")
    if choice.kind is Kind.ALONG:
        raise Mixes("chooses a branch or ends a loop by the values of positions")
    if choice.degree:
        raise Mixes("chooses a branch or ends a loop by the number of positions", "number")


def _shard_map(walk: Walk, pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Walk into a `shard_map` of the user's code, if it does not split the positions."""
    in_specs, out_specs = pair.params["in_specs"], pair.params["out_specs"]
    for fact, spec in zip(facts, in_specs, strict=True):
        if fact.kind is Kind.ALONG and len(spec) > fact.dim and spec[fact.dim] is not None:
            raise Mixes("splits the positions itself")
    results = walk.program(pair.params["jaxpr"], pair.two.params["jaxpr"], facts)
    for fact, spec in zip(results, out_specs, strict=True):
        if fact.kind is Kind.ALONG and len(spec) > fact.dim and spec[fact.dim] is not None:
            raise Mixes("splits the positions itself")
    return results


_SLICES = frozenset({"slice", "dynamic_slice"})

_PROGRAM_PARAMS = frozenset(
    {"num_consts", "num_carry", "reverse", "cond_nconsts", "body_nconsts", "in_specs", "out_specs"}
)
"""Parameters of control flow that determine how operands become inputs of the inner jaxprs."""

_PROGRAMS: dict[str, Callable[[Walk, Pair, list[Fact]], list[Fact]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
