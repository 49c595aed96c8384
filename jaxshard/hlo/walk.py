"""List the operations that a compiled program executes, in all computations that it calls, and how often each runs.

%w = (...) while(%init), condition=%cond, body=%body      of 12 iterations
in %body:  %f = f32[64] fusion(%x), calls=%fused          12 times, and so is every operation of %fused
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxshard.hlo import hlo
from jaxshard.hlo.asynchronous import operands_of
from jaxshard.hlo.counts import total
from jaxshard.hlo.dataflow import trip_count

_CALLING = re.compile(r"\b(?:calls|to_apply|body|branch_computations|true_computation|called_computations)=[{%]")
_MOST_PLACES = 10_000
"""The most places from which a program may run an operation: computations that call each other twice double them."""


class Executed(NamedTuple):
    """An operation, at one of the places from which a program runs it.

    Attributes:
      scope: the computation that contains it, with the chain of calls that leads there.
      op: the operation.
      times: executions per step; None in a loop of unknown trip count.
      conditional: True in a branch of a conditional; `times` then assumes that the branch is always taken.
    """

    scope: hlo.Scope
    op: hlo.Op
    times: int | None
    conditional: bool


def executed(module: hlo.Module, wanted: re.Pattern[str], *, fused: bool = True) -> Iterator[Executed]:
    """Yield the operations whose line matches a pattern, in the order of the program.

    An operation whose computation is called from several places is yielded for each of them.

    Args:
      module: the program.
      wanted: the pattern, for lines of the form `name = type opcode(operands), ...`.
      fused: also yield operations inside fusions, which are not executed one by one.

    Raises:
      ValueError: the program runs such an operation from too many places.
    """
    entry = hlo.Scope(module, module.computations[module.entry])
    found = _executed(entry, _Wanted(wanted, fused, _reaching(module, wanted)), 1, False)
    places: Counter[tuple[str, str]] = Counter()
    for one in found:
        places[at := (one.scope.computation.name, one.op.name)] += 1
        if places[at] > _MOST_PLACES:
            raise ValueError(f"the program runs %{one.op.name} from more than {_MOST_PLACES} places")
        yield one


class _Wanted(NamedTuple):
    """The operations that a walk looks for.

    Attributes:
      pattern: the pattern of their lines.
      fused: True to look inside fusions too.
      reaching: the names of the computations that contain such a line, or call a computation that does.
    """

    pattern: re.Pattern[str]
    fused: bool
    reaching: frozenset[str]


def _reaching(module: hlo.Module, wanted: re.Pattern[str]) -> frozenset[str]:
    """Return the names of the computations that contain a wanted line, directly or in a computation that they call."""
    callers: dict[str, list[str]] = {}
    for caller, callees in module.calls.items():
        for callee in callees:
            callers.setdefault(callee, []).append(caller)
    queue = [
        name
        for name, computation in module.computations.items()
        if any(wanted.search(f"{op} = {line}") for op, line in computation.lines.items())
    ]
    found: set[str] = set()
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += callers.get(name, ())
    return frozenset(found)


def _executed(scope: hlo.Scope, wanted: _Wanted, times: int | None, conditional: bool) -> Iterator[Executed]:
    if scope.computation.name not in wanted.reaching:
        return
    for name, line in scope.computation.lines.items():
        if wanted.pattern.search(f"{name} = {line}"):
            yield Executed(scope, scope.computation[name], times, conditional)
        if _CALLING.search(line):
            op = scope.computation[name]
            if _is_fusion(op) and not wanted.fused:
                continue
            for inner, trips in _calls(scope, op):
                total = None if times is None or trips is None else times * trips
                yield from _executed(inner, wanted, total, conditional or op.opcode == "conditional")


def _calls(scope: hlo.Scope, op: hlo.Op) -> Iterator[tuple[hlo.Scope, int | None]]:
    """Yield (computation, times) for each computation that an operation runs; a branch of a conditional counts once."""
    if op.opcode == "while":
        trips = trip_count(scope, op)
        body, condition = (scope.enter(op, op.callee(name)) for name in ("body", "condition"))
        yield body, trips
        yield condition, total([trips, 1])  # the last time it ends the loop
    elif op.opcode == "conditional":  # the first operand chooses, each branch has one of the others
        for name, operand in zip(op.callees, op.operands[1:], strict=True):
            yield scope.enter(op, name, (operand,)), 1
    else:
        for name in op.runs:
            yield scope.enter(op, name, operands_of(scope.computation, op)), 1


def is_fused(scope: hlo.Scope) -> bool:
    """Return True if the computation is the body of a fusion."""
    return scope.caller is not None and _is_fusion(scope.caller)


def _is_fusion(op: hlo.Op) -> bool:
    return op.opcode.removesuffix("-start") == "fusion"
