"""Results of a step that are gathered into arrays of their own, and copied over the arguments in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jaxshard.plan.memory.graph import CUT, Op, Region, Value
from jaxshard.plan.memory.shards import GATHERS


def gathered_apart(region: Region) -> set[Value]:
    """Find the results that XLA gathers into arrays of their own on TPUs whose collectives run on the chips themselves.

    Under ZeRO each device updates a part of a parameter and gathers the whole. What compares the part with the one
    before, as the norm of an update does, then reads both arrays whole, behind the gather. Where the gather of one
    parameter and the norm of another one's update are one operation, all copies come in the end.

    Args:
      region: a whole step, not the body of a loop.
    """
    return {gather.outs[0] for gather in _compared_gathers(region) if gather.name != "all_gather"}


def is_put_in_order(gather: Op) -> bool:
    """Return True for a gather of parts that do not lie one behind the other in the array that they make."""
    part, made = gather.ins[0].shard, gather.outs[0].shard
    return math.prod(part) < math.prod(made) and part[1:] != made[1:]


def _compared_gathers(region: Region) -> Iterator[Op]:
    """Yield what gathers updated parts to results, if the parts are compared with the parameters that were there."""
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
            yield gather


def _compares(op: Op, updated: Value, argument: Value, makers: Mapping[Value, Op]) -> bool:
    """True for an operation on the updated part and the part of the argument that it replaces."""
    first, second = (_origin(one, makers) for one in op.ins)
    return first is _origin(updated, makers) and second is argument


def _origin(value: Value, makers: Mapping[Value, Op]) -> Value:
    """Return the value of which this one is the same array, or a part that the device holds anyway."""
    while (op := makers.get(value)) is not None and op.name in ("sharding_constraint", "enter", "enter_moved", CUT):
        value = op.ins[0]
    return value
