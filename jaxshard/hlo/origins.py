"""Trace a value back to the argument of the step that it copies, such as the weight that a collective gathers.

    %copy  = bf16[3,8,64] convert(%p.8)                             p.8 is the argument 4
    %w     = (..., bf16[3,8,64]) while(%init), body=%body
    in %body:  %one = bf16[1,8,64] dynamic-slice(%stack, %i, ...)   one of three
               %g   = bf16[1,32,64] all-gather(%one)                origin of %one: argument 4

A computed value, such as an activation or a gradient, has no origin.
"""

from __future__ import annotations

from jaxshard.hlo import hlo
from jaxshard.hlo.dataflow import Path, resolve
from jaxshard.hlo.groups import groups_of

_MOVES = (
    "all-gather", "bitcast-convert", "broadcast", "collective-permute", "copy", "dynamic-slice", "opt-barrier", "pad",
    "reduce-precision", "reverse", "slice", "transpose",
)  # fmt: skip
_CONSTANT = ("constant", "iota", "partition-id")
_MOST = 400
"""The number of operations after which a search gives up."""


def find_origin(scope: hlo.Scope, name: str) -> tuple[tuple[int, ...], int]:
    """Find the arguments of the compiled step that a value is a copy of, after moves and casts only.

    Returns:
      (indices, factor): the indices of these arguments, several if they were joined, () for a computed value; and the
      factor by which all-gathers on the way enlarged the arguments, 1 without any.
    """
    found: set[int] = set()
    gathered = 1
    queue: list[tuple[hlo.Scope, str, Path]] = [(scope, name, ())]
    seen: set[tuple[str, str, Path]] = set()
    while queue:
        at, op, path = resolve(*queue.pop())
        key = (at.computation.name, op.name, path)
        if key in seen:
            continue
        if len(seen) == _MOST:
            return (), 1
        seen.add(key)
        outer, loop = (at.parent, at.caller) if op.opcode == "parameter" else (at, op)
        if outer is None or loop is None:
            found.add(int(op.inside))
        elif loop.opcode == "while" and path:  # the initial value, and the value that each iteration returns
            body = outer.enter(loop, loop.callee("body"))
            queue += [(outer, loop.operands[0], path), (body, body.computation.root, path)]
        elif op.opcode.removesuffix("-start").removesuffix("-done") in _MOVES and op.operands:
            if op.opcode.startswith("all-gather") and "replica_groups=" in op.attributes:
                gathered *= len(groups_of(op, at.module)[0])
            inner = path[1:] if op.opcode.endswith("-done") else ()
            queue.append((at, op.operands[0], inner))
        elif op.opcode in ("concatenate", "dynamic-update-slice"):
            queue += [(at, operand, ()) for operand in op.operands[: 2 if "update" in op.opcode else None]]
        elif op.opcode not in _CONSTANT:
            return (), 1
    return tuple(sorted(found)), gathered
