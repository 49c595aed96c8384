"""Which of a step's arguments a value is, seen through whatever only moves it: the weight that a collective gathers.

    %copy  = bf16[3,8,64] convert(%p.8)                             p.8 is the argument 4
    %w     = (..., bf16[3,8,64]) while(%init), body=%body
    in %body:  %one = bf16[1,8,64] dynamic-slice(%stack, %i, ...)   one of three
               %g   = bf16[1,32,64] all-gather(%one)                origin of %one: argument 4

A value that is computed, as activations and gradients are, has no origin.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.dataflow import Path, resolve
from jaxshard.checks.collectives.groups import parse_groups

_MOVES = (
    "all-gather", "all-gather-done", "all-gather-start", "bitcast-convert", "broadcast", "copy-done", "copy-start",
    "dynamic-slice", "opt-barrier", "pad", "reduce-precision", "reverse", "slice", "transpose", "collective-permute",
    "collective-permute-start", "collective-permute-done",
)  # fmt: skip
_CONSTANT = ("constant", "iota", "partition-id")
_MOST = 400
"""Operations that are looked at before a search gives up."""


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      arguments: the numbers of the arguments that it is made of, moved and cast alone.
      gathered: how many times larger than these it was made by gathers on the way.
    """

    arguments: frozenset[int]
    gathered: int = 1


NOWHERE = Origin(frozenset())


def find_origin(scope: hlo.Scope, name: str) -> Origin:
    """Follow a value back to the arguments that it is made of; `NOWHERE` for one that is computed."""
    found: set[int] = set()
    gathered = 1
    queue: list[tuple[hlo.Scope, str, Path]] = [(scope, name, ())]
    seen: set[tuple[str, str, Path]] = set()
    while queue:
        at, op, path = resolve(*queue.pop())
        key = (at.computation.name, op.name, path)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > _MOST:
            return NOWHERE
        if op.opcode == "parameter" and at.parent is None:
            found.add(int(op.inside))
        elif op.opcode == "parameter" and at.caller is not None and at.caller.opcode == "while" and path:
            queue += _carried(at.parent, at.caller, path)
        elif op.opcode == "while" and path:
            queue += _carried(at, op, path)
        elif op.opcode in _MOVES and op.operands:
            if op.opcode.startswith("all-gather") and "replica_groups=" in op.attributes:
                text = op.attributes.partition("replica_groups=")[2]
                gathered *= len(parse_groups(text, at.module.devices)[0])
            inner = path[1:] if op.opcode.endswith("-done") else ()
            queue.append((at, op.operands[0], inner))
        elif op.opcode in ("concatenate", "dynamic-update-slice"):
            queue += [(at, operand, ()) for operand in op.operands[: 2 if "update" in op.opcode else None]]
        elif op.opcode not in _CONSTANT:
            return NOWHERE
    return Origin(frozenset(found), gathered)


def _carried(scope: hlo.Scope | None, loop: hlo.Op, path: Path) -> list[tuple[hlo.Scope, str, Path]]:
    """What a loop carries in one element: what it began with, and what each turn puts there."""
    assert scope is not None
    body = scope.enter(loop, loop.callee("body"))
    return [(scope, loop.operands[0], path), (body, body.computation.root, path)]
