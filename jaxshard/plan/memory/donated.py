"""Arguments that a step writes its results over while it still needs them: compilers copy these first."""

from __future__ import annotations

from collections.abc import Mapping

from jaxshard.plan.memory.graph import Op, Region, Value


def overwritten_early(region: Region) -> list[Value]:
    """Find the arguments that a gather writes over before the last operation that reads them.

    A step's results are written over its arguments, in the same order. Under ZeRO each device updates a part of a
    parameter and gathers the whole: split along its first dimension, the parts lie one behind the other, and the gather
    itself writes the result (along another one they are put in order by an operation that comes later). What compares
    the updated part with the one before, as the norm of an update does, XLA for GPUs runs after that gather.

    Args:
      region: a whole step, not the body of a loop.
    """
    makers = {one: op for op in region.ops for one in op.outs}
    found = []
    for argument, result in zip(region.inputs, region.outputs, strict=False):
        if argument.role != "parameters" or (argument.shard, argument.dtype) != (result.shard, result.dtype):
            continue
        updated = _gathered(makers.get(result))
        if updated is not None and any(_compares(op, updated, argument, makers) for op in region.ops):
            found.append(argument)
    return found


def _gathered(gather: Op | None) -> Value | None:
    """Return what an operation gathers along the first dimension; None if it does something else."""
    if gather is None or gather.name not in ("all_gather", "sharding_constraint", "enter_moved"):
        return None
    (part,), (made,) = gather.ins[:1], gather.outs
    along_first = part.shard and part.shard[0] < made.shard[0] and part.shard[1:] == made.shard[1:]
    return part if along_first else None


def _compares(op: Op, updated: Value, argument: Value, makers: Mapping[Value, Op]) -> bool:
    """True for an operation on the updated part and the part of the argument that it replaces."""
    if op.name != "sub" or len(op.ins) != 2:
        return False
    first, second = (_origin(one, makers) for one in op.ins)
    return first is _origin(updated, makers) and second is argument


def _origin(value: Value, makers: Mapping[Value, Op]) -> Value:
    """Return the value of which this one is the same array, or a part that the device holds anyway."""
    while (op := makers.get(value)) is not None and op.name in ("sharding_constraint", "enter", "enter_moved"):
        value = op.ins[0]
    return value
