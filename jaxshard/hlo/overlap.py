"""Tell collectives that a device waits for from those that run while it computes.

A compiler that lets a collective overlap with computation splits it in two, and schedules work in between:

    %s = (f32[8], f32[64]) all-gather-start(%x), ...         or async-start(%x), calls=%of_an_all_gather
    %w = f32[256,256] fusion(%a, %b), kind=kOutput, ...      the work that hides it
    %d = f32[64] all-gather-done(%s)

If there is nothing between such a pair, the device waits, as it does for a single operation. A TPU has a third form:
fusions that compute a product and advance the collective at the same time. Each repeats the collective, and passes its
state on:

    %s = (...) fusion(%x), kind=kCustom, calls=%begin       in it: all-gather, custom-call "AsyncCollectiveStart"
    %f = (...) fusion(%a, %b, %s#0), kind=kOutput, calls=%go  in it: the same, and a convolution
    %d = f32[64] fusion(%f#1), kind=kCustom, calls=%end       in it: the same, custom-call "AsyncCollectiveDone"
"""

from __future__ import annotations

import math

from jaxshard.hlo import hlo
from jaxshard.hlo.walk import is_fused

_NO_WORK = (
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "partition-id", "recv",
    "replica-id", "send", "tuple",
)  # fmt: skip
"""Opcodes that take no time."""
_BOOKKEEPING = ("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone")
"""Targets of a TPU's custom calls that take no time either."""
_CALLS = ("fusion", "call", "custom-call")
"""Opcodes that run a computation at once."""
_HALVES = ("-start", "-update", "-done")
_HANDS_ON = ("get-tuple-element", "tuple", "bitcast")


def is_synchronous(scope: hlo.Scope, op: hlo.Op) -> bool:
    """Return True if the device waits for a collective: nothing is computed between its start and its end.

    Args:
      scope: the computation that contains the collective.
      op: the collective itself, or its start.
    """
    if is_fused(scope) and "chain_id=" in op.notes:
        return _ends_at_once(*next(scope.callers))
    for at, (outer, start) in enumerate([(scope, op), *scope.callers]):
        if start.opcode.endswith("-start") or start.opcode in ("send", "recv"):
            # A GPU's compiler writes a pair even for a collective that it runs on the stream of the computation.
            return '"is_sync":true' in start.notes or _ends_at_once(outer, start)
        if at and start.opcode not in _CALLS:
            break
    return True


def _ends_at_once(scope: hlo.Scope, start: hlo.Op) -> bool:
    """Return True if the scheduled program computes nothing between a `-start` operation and its `-done`.

    On a TPU's SparseCore the `-start` has no operands. There the collective begins with the `-update`, which has them.
    """
    state, begun, names = {start.name}, bool(start.operands), list(scope.computation.lines)
    for op in (scope.computation[name] for name in names[names.index(start.name) + 1 :]):
        uses = not state.isdisjoint(op.operands)
        hands_on = op.opcode in _HANDS_ON or op.opcode.endswith("-update")
        if uses and hands_on:
            state.add(op.name)
            begun = begun or op.opcode.endswith("-update")
        elif begun and _is_work(scope, op):
            return False
        elif uses:
            return True
    return False  # it ends in another iteration of the loop


def _is_work(scope: hlo.Scope, op: hlo.Op) -> bool:
    """Return True if an operation takes time on the device; bookkeeping and asynchronous starts and ends do not."""
    if op.opcode == "fusion":
        inside = scope.module.computations[op.callees[0]]
        return not any(
            '"AsyncCollectiveStart"' in line or '"AsyncCollectiveDone"' in line for line in inside.lines.values()
        )
    if op.opcode in _NO_WORK or op.opcode.endswith(_HALVES):
        return False
    if op.opcode == "custom-call":
        return (op.attribute("custom_call_target") or "").strip('"') not in _BOOKKEEPING
    return not _is_scalar_arithmetic(scope.computation, op)


def _is_scalar_arithmetic(computation: hlo.Computation, op: hlo.Op) -> bool:
    """Return True for arithmetic on scalars, such as loop counters and offsets: it takes too little time to matter."""
    values = (op, *(computation[name] for name in op.operands))
    return not op.callees and all(math.prod(shape) == 1 for one in values for _, shape in hlo.arrays(one.type))
