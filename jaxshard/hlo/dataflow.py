"""Follow values of a compiled program back to the operations that compute them, and count the iterations of loops.

XLA passes values through tuples, copies, fusions, calls and the carries of loops. `resolve` follows a value back to the
operation that computes it:

    %limit = s32[] constant(5)
    %init  = (s32[], f32[64,16], s32[]) tuple(%zero, %p, %limit)
    %w     = (s32[], f32[64,16], s32[]) while(%init), condition=%cond, body=%body

    in %cond:  %n = s32[] get-tuple-element(%c), index=2        resolve -> %limit, if %body returns element 2 unchanged
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxshard.hlo.asynchronous import find_start, operands_of, starts_computation
from jaxshard.hlo.hlo import Op, Scope

Path = tuple[int, ...]
"""Indices into nested tuples, the outermost first."""

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
}


def resolve(scope: Scope, name: str, path: Path = ()) -> tuple[Scope, Op, Path]:
    """Find the operation that computes a value, through tuples, copies, casts, reshapes, fusions, calls and loops.

    Args:
      scope: the computation that uses the value.
      name: the name of the value.
      path: the element to follow if the value is a tuple: `(2, 0)` is element 0 of element 2, () the value itself.

    Returns:
      (the scope of the operation, the operation, the path of the value inside its result).
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
                else:  # every iteration computes it anew
                    return scope, op, path
                scope = scope.parent
            case _:
                return scope, op, path


def _is_started(scope: Scope, op: Op) -> bool:
    """Return True for a custom call, inside an asynchronous computation, that runs another computation."""
    return bool(op.runs) and scope.caller is not None and starts_computation(scope.caller)


def _is_unchanged(scope: Scope, loop: Op, index: int) -> bool:
    """Return True if a loop's body returns element `index` of its carry unchanged."""
    body = scope.module.computations[loop.callee("body")]
    at, op, path = resolve(Scope(scope.module, body), body.root, (index,))
    return at.computation is body and op.opcode == "parameter" and path == (index,)


class _Iteration(NamedTuple):
    """Iteration `number` (from 0 on) of a `loop` whose counter starts from a constant and changes by constants."""

    scope: Scope
    loop: Op
    number: int

    def element(self, index: int) -> int | None:
        """Return the integer in element `index` of the carry at the start of the iteration; None if unknown."""
        if self.number == 0:
            return integer(self.scope, self.loop.operands[0], (index,))
        body = self.scope.enter(self.loop, self.loop.callee("body"))
        return integer(body, body.computation.root, (index,), self._replace(number=self.number - 1))


_Known = dict[tuple[Scope, str, Path], int | None]
"""The integers that are computed already: operations that use a value twice would double the work with each other."""


def integer(
    scope: Scope, name: str, path: Path = (), iteration: _Iteration | None = None, known: _Known | None = None
) -> int | None:
    """Compute the value of an integer scalar of the program from constants; None if it depends on anything else.

    Args:
      scope: the computation that uses the scalar.
      name: the name of the value.
      path: the element to follow if the value is a tuple, as in `resolve`.
      iteration: the loop iteration in which it is computed; needed if it depends on a loop's carry.
      known: integers of the same iteration, to which those that are computed here are added.
    """
    known = {} if known is None else known
    scope, op, path = resolve(scope, name, path)
    key = (scope, op.name, path)
    if key not in known:
        known[key] = _compute(scope, op, path, iteration, known)
    return known[key]


def _compute(scope: Scope, op: Op, path: Path, iteration: _Iteration | None, known: _Known) -> int | None:
    """Compute the integer that element `path` of the result of an operation is, as `integer` does."""
    if op.opcode == "constant":
        return int(op.inside) if re.fullmatch(r"-?\d+", op.inside) else None
    if op.opcode == "parameter" and iteration is not None and scope.caller is iteration.loop and len(path) == 1:
        return iteration.element(path[0])
    if op.opcode not in _ARITHMETIC or path:
        return None
    left, right = (integer(scope, operand, (), iteration, known) for operand in op.operands)
    return None if left is None or right is None else _ARITHMETIC[op.opcode](left, right)


def trip_count(scope: Scope, loop: Op) -> int | None:
    """Return the trip count of a while loop; None if unknown.

    Most compilers write it into the program (`known_trip_count`). TPU programs do not have it. Their loop condition
    compares a counter with a limit, and the trip count follows if the distance between these two integers changes by
    the same amount in each of the first iterations.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.notes):
        return int(noted[1])
    condition = scope.enter(loop, loop.callee("condition"))
    inner, compare, _ = resolve(condition, condition.computation.root)
    if compare.opcode != "compare":
        return None
    distances = []
    for iteration in (_Iteration(scope, loop, number) for number in range(3)):
        left, right = (integer(inner, operand, (), iteration) for operand in compare.operands)
        if left is None or right is None:
            return None
        distances.append(left - right)
    first, second, third = distances
    return _count_iterations(first, second - first, compare) if third - second == second - first else None


def _count_iterations(distance: int, step: int, compare: Op) -> int | None:
    """Count the iterations of `while distance <direction> 0: distance += step`; None if the distance misses 0."""
    direction = compare.attribute("direction")
    if direction in ("GT", "GE") or (direction == "NE" and distance > 0):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance -= 1
    if step <= 0 or direction == "EQ" or (direction == "NE" and distance % step):
        return None
    return len(range(distance, 0, step))
