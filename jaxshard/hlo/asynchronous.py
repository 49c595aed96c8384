"""Find the start, the update and the end of asynchronous computations in a compiled program.

The start has the operands, or, on a TPU's SparseCore, an update has them:

    %s = ((f32[8]), f32[64], s32[]) async-start(%x), calls=%gather
    %d = f32[64] async-done(%s)

    %s = ((), (), s32[1]) custom-call-start(), called_computations={%gather}
    %u = ((f32[8]), f32[64], s32[1]) custom-call-update(%s, %x)
    %d = f32[64] custom-call-done(%u)

The opcode before the dash differs between versions of XLA. An operation such as `all-gather-start` has the same parts
and calls no computation.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxshard.hlo import hlo


def starts_computation(op: hlo.Op) -> bool:
    """Return True if an operation, such as an `async-start`, starts another computation asynchronously."""
    return op.opcode.endswith("-start") and bool(op.runs)


def find_start(computation: hlo.Computation, op: hlo.Op) -> hlo.Op:
    """Return the `-start` of the asynchronous operation to which `op`, a `-done` or `-update`, belongs; else `op`."""
    while op.opcode.endswith(("-update", "-done")) or op.opcode == "get-tuple-element":
        op = computation[op.operands[0]]
    return op


def operands_of(computation: hlo.Computation, start: hlo.Op) -> tuple[str, ...]:
    """Return the operands of a `-start` operation, or of its `-update` if it has none, as on a SparseCore."""
    if start.operands or not starts_computation(start):
        return start.operands
    updates = (user for user in users(computation, start.name) if user.opcode.endswith("-update"))
    return next((user.operands[1:] for user in updates if len(user.operands) > 1), ())


def users(computation: hlo.Computation, name: str) -> Iterator[hlo.Op]:
    """Yield all users of the value `name`, also those that read it through a tuple, bitcast, reshape or copy."""
    for op in (computation[user] for user in computation.users.get(name, ())):
        yield op
        if op.opcode in ("get-tuple-element", "bitcast", "reshape", "copy"):
            yield from users(computation, op.name)
