"""Arguments that a step's results are written over while it still needs them: one of the two is there twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.memory.shards import GATHERS


def overwritten_early(region: Region) -> list[Value]:
    """Find the arguments that a gather writes over before the last operation that reads them.

    A step's results are written over its arguments, in the same order. Under ZeRO each device updates a part of a
    parameter and gathers the whole: split along its first dimension, the parts lie one behind the other, and the gather
    itself writes the result (along another one they are put in order by an operation that comes later). What compares
    the updated part with the one before, as the norm of an update does, XLA for GPUs runs after that gather.

    Args:
      region: a whole step, not the body of a loop.
    """
    return [argument for argument, gather in _compared_gathers(region) if _is_along_first(gather)]


def gathered_apart(region: Region) -> set[Value]:
    """Find the results that XLA for TPUs gathers into arrays of their own, and copies over the arguments.

    They are those of `overwritten_early`, split along any dimension, where the compiler chooses the collectives: the
    norm of an update reads both arrays whole. Where the gather of one parameter and the norm of another one's update
    are one operation, all copies come in the end; where SparseCores gather, each follows its norm as a rule.
    """
    return {gather.outs[0] for _, gather in _compared_gathers(region) if gather.name != "all_gather"}


def is_put_in_order(gather: Op) -> bool:
    """Return True for a gather of parts that do not lie one behind the other in the array that they make."""
    part, made = gather.ins[0].shard, gather.outs[0].shard
    return math.prod(part) < math.prod(made) and part[1:] != made[1:]


def _compared_gathers(region: Region) -> Iterator[tuple[Value, Op]]:
    """Yield the parameters whose updated parts are compared with them, and what gathers the parts to a result."""
    makers = {one: op for op in region.ops for one in op.outs}
    differences = [op for op in region.ops if op.name == "sub" and len(op.ins) == 2]
    for argument, result in zip(region.inputs, region.outputs, strict=False):
        if argument.role != "parameters" or (argument.shard, argument.dtype) != (result.shard, result.dtype):
            continue
        gather = makers.get(result)
        if gather is None or gather.name not in GATHERS:
            continue
        (part,), (made,) = gather.ins[:1], gather.outs
        is_part = math.prod(part.shard) < math.prod(made.shard)
        if is_part and any(_compares(op, part, argument, makers) for op in differences):
            yield argument, gather


def _is_along_first(gather: Op) -> bool:
    part, made = gather.ins[0].shard, gather.outs[0].shard
    return bool(part) and part[0] < made[0] and part[1:] == made[1:]


def _compares(op: Op, updated: Value, argument: Value, makers: Mapping[Value, Op]) -> bool:
    """True for an operation on the updated part and the part of the argument that it replaces."""
    first, second = (_origin(one, makers) for one in op.ins)
    return first is _origin(updated, makers) and second is argument


def _origin(value: Value, makers: Mapping[Value, Op]) -> Value:
    """Return the value of which this one is the same array, or a part that the device holds anyway."""
    while (op := makers.get(value)) is not None and op.name in ("sharding_constraint", "enter", "enter_moved"):
        value = op.ins[0]
    return value
