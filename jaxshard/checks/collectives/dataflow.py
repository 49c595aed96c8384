"""Where a value of a compiled program comes from, and from that how often a loop runs.

XLA hands values on through tuples, copies, fusions, calls and the carries of loops. `resolve` follows a value back to
the operation that really makes it:

    %limit = s32[] constant(5)
    %init  = (s32[], f32[64,16], s32[]) tuple(%zero, %p, %limit)
    %w     = (s32[], f32[64,16], s32[]) while(%init), condition=%cond, body=%body

    in %cond:  %n = s32[] get-tuple-element(%c), index=2        resolve -> %limit, if %body hands element 2 on unchanged
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxshard.checks.collectives.asynchronous import find_start, operands_of, starts_computation
from jaxshard.checks.collectives.hlo import Computation, Op, Scope

Path = tuple[int, ...]
"""Indices into nested tuples, the outermost first."""

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def resolve(scope: Scope, name: str, path: Path = ()) -> tuple[Scope, Op, Path]:
    """Find the operation that makes a value, seen through whatever hands it on as it is.

    Args:
      scope: where the value is used.
      name: the value.
      path: the element of it that is meant, where it is a tuple.

    Returns:
      The operation, the scope it stands in, and the element of its value that is meant.
    """
    while True:
        op = scope.computation[name]
        match op.opcode:
            case "get-tuple-element":
                path = (int(op.attribute("index") or 0), *path)
                name = op.operands[0]
            case "tuple" if path:
                name, path = op.operands[path[0]], path[1:]
            case "copy" | "copy-start" | "copy-done" | "bitcast" | "convert" | "reshape" | "optimization-barrier":
                name = op.operands[0]
            case "fusion" | "call" | "custom-call" if op.opcode != "custom-call" or _is_started(scope, op):
                scope = scope.enter(op, op.callees[0])
                name = scope.computation.root
            case end if end.endswith("-done") and starts_computation(start := find_start(scope.computation, op)):
                scope = scope.enter(start, start.runs[0], operands_of(scope.computation, start))
                name = scope.computation.root
            case "while" if path and _is_unchanged(scope, op, path[0]):
                name = op.operands[0]
            case "parameter" if scope.parent is not None and scope.caller is not None:
                if scope.caller.opcode != "while":
                    name = scope.arguments[int(op.inside)]
                elif path and _is_unchanged(scope, scope.caller, path[0]):
                    name = scope.arguments[0]
                else:  # each turn of the loop makes it anew
                    return scope, op, path
                scope = scope.parent
            case _:
                return scope, op, path


def _is_started(scope: Scope, op: Op) -> bool:
    """True for the custom call of a computation that was started to run what it calls."""
    return bool(op.runs) and scope.caller is not None and starts_computation(scope.caller)


def _is_unchanged(scope: Scope, loop: Op, index: int) -> bool:
    """Return True if a loop's body hands element `index` of its carry on as it got it."""
    body = scope.module.computations[loop.callee("body")]
    at, op, path = resolve(Scope(scope.module, body), body.root, (index,))
    return at.computation is body and op.opcode == "parameter" and path == (index,)


def integer(scope: Scope, name: str, path: Path = ()) -> int | None:
    """Return the value of an integer scalar where it is made of constants alone, else None."""
    scope, op, path = resolve(scope, name, path)
    if op.opcode == "constant":
        return int(op.inside) if re.fullmatch(r"-?\d+", op.inside) else None
    if op.opcode not in _ARITHMETIC or path:
        return None
    left, right = (integer(scope, operand) for operand in op.operands)
    return None if left is None or right is None else _ARITHMETIC[op.opcode](left, right)


def trip_count(scope: Scope, loop: Op) -> int | None:
    """Return how often the body of a while loop runs: what the compiler noted, else from its counter, else None.

    TPU programs carry no note. A counter is an element of the carry that starts at a constant, moves by a constant and
    is compared with a constant; the compiler writes `limit > i` as well as `i < limit`.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.notes):
        return int(noted[1])
    body, condition = (scope.enter(loop, loop.callee(name)) for name in ("body", "condition"))
    inner, compare, _ = resolve(condition, condition.computation.root)
    counter = _find_counter(inner, compare, condition.computation) if compare.opcode == "compare" else None
    if counter is None:
        return None
    start = integer(scope, loop.operands[0], (counter.element,))
    limit = integer(inner, counter.other)
    step = _counter_step(body, counter.element)
    if start is None or limit is None or not step:
        return None
    direction = compare.attribute("direction") or ""
    return _count_turns(start, limit, step, _MIRRORED.get(direction, direction) if counter.is_second else direction)


class _Counter(NamedTuple):
    """An operation of which one operand is the counter of a loop: its element of the carry, and the other operand."""

    element: int
    other: str
    is_second: bool


def _find_counter(scope: Scope, op: Op, owner: Computation) -> _Counter | None:
    """Find which operand is an element of the loop's carry, if any; `owner` is the loop's body or condition."""
    left, right = op.operands
    for name, other, is_second in ((left, right, False), (right, left, True)):
        at, maker, path = resolve(scope, name)
        if maker.opcode == "parameter" and at.computation is owner and len(path) == 1:
            return _Counter(path[0], other, is_second)
    return None


def _counter_step(scope: Scope, index: int) -> int | None:
    """The constant that a loop's body adds to element `index` of its carry; None where it does something else."""
    at, op, path = resolve(scope, scope.computation.root, (index,))
    if op.opcode not in ("add", "subtract") or path:
        return None
    counter = _find_counter(at, op, scope.computation)
    if counter is None or counter.element != index or (op.opcode == "subtract" and counter.is_second):
        return None
    amount = integer(at, counter.other)
    return amount if amount is None or op.opcode == "add" else -amount


def _count_turns(start: int, limit: int, step: int, direction: str) -> int | None:
    """The turns of `while i <direction> limit: i += step`; None where the counter runs away from the limit."""
    if direction == "NE":
        turns, rest = divmod(limit - start, step)
        return turns if rest == 0 and turns >= 0 else None
    stops = {"LT": limit, "LE": limit + 1} if step > 0 else {"GT": limit, "GE": limit - 1}
    return len(range(start, stops[direction], step)) if direction in stops else None
