"""Asynchronous computations of a program: their start, their update and their end.

The operands come with the start, or, for a TPU's SparseCore, with an update:

    %s = ((f32[8]), f32[64], s32[]) async-start(%x), calls=%gather
    %d = f32[64] async-done(%s)

    %s = ((), (), s32[1]) custom-call-start(), called_computations={%gather}
    %u = ((f32[8]), f32[64], s32[1]) custom-call-update(%s, %x)
    %d = f32[64] custom-call-done(%u)

The word before the dash says how the computation is called, and differs between versions of XLA. An operation that runs
by itself, such as `all-gather-start`, has the same three parts and calls no computation.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxshard.checks.collectives import hlo


def starts_computation(op: hlo.Op) -> bool:
    """Return True for an asynchronous call of a computation, whatever the name of its opcode."""
    return op.opcode.endswith("-start") and bool(op.runs)


def find_start(computation: hlo.Computation, op: hlo.Op) -> hlo.Op:
    """Return the start that an update or an end belongs to; any other operation is returned as it is."""
    while op.opcode.endswith(("-update", "-done")) or op.opcode == "get-tuple-element":
        op = computation[op.operands[0]]
    return op


def operands_of(computation: hlo.Computation, start: hlo.Op) -> tuple[str, ...]:
    """Return the operands of a start; where it has none, those of the update that brings them."""
    if start.operands or not starts_computation(start):
        return start.operands
    updates = (user for user in users(computation, start.name) if user.opcode.endswith("-update"))
    return next((user.operands[1:] for user in updates if len(user.operands) > 1), ())


def users(computation: hlo.Computation, name: str) -> Iterator[hlo.Op]:
    """Yield the operations that use a value, also as an element of a tuple or in another shape."""
    for op in (computation[user] for user in computation.users.get(name, ())):
        yield op
        if op.opcode in ("get-tuple-element", "bitcast", "reshape", "copy"):
            yield from users(computation, op.name)
