"""What loops stack, as one array of all turns, and the slices that later loops take of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from jaxshard.plan.memory.graph import Op, Region, Value, contracted_axes, every_op
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.order import passed_on


def sum_within_turns(region: Region) -> None:
    """Sum gradients that loops stack in parts in each turn, and cut the parts from them at its end.

    Of such a gradient the program has only the product, of one device's rows, and the parts that are stacked, where the
    compiler chooses the collectives. It sums the whole of it over devices in between, beside what follows in the turn.
    """
    for op in every_op(region):
        if op.name != "scan":
            continue
        (body,) = op.regions
        makers = {one: inner for inner in body.ops for one in inner.outs}
        last: list[Op] = []
        for number, stack in enumerate(op.outs[op.counts[1] :], op.counts[1]):
            maker, passed = passed_on(body.outputs[number], makers)
            if maker is None or maker.name not in PRODUCTS:
                continue
            (value,) = maker.outs
            if math.prod(value.shard) <= math.prod(stack.shard[1:]):
                continue
            whole = replace(value)
            body.ops.insert(body.ops.index(maker) + 1, Op("psum", [value], [whole], maker.path))
            if passed:
                passed[-1].ins = [whole]
            made = body.outputs[number] if passed else whole
            body.outputs[number] = replace(made, split=stack.split[1:], shard=stack.shard[1:])
            cut = Op("slice", [made], [body.outputs[number]], maker.path)
            last = [*passed[::-1], cut, *last]
        body.ops = [inner for inner in body.ops if inner not in last] + last


def sum_beside_products(region: Region) -> None:
    """Sum gradients of which a turn adds a part to the sum so far as soon as their operands are there.

    The sum over devices runs beside the products that follow, which read the same operands, and is cut behind them.
    """
    for op in every_op(region):
        if op.name != "scan":
            continue
        (body,) = op.regions
        makers = {one: inner for inner in body.ops for one in inner.outs}
        for cut in [inner for inner in body.ops if inner.name == "sharding_constraint"]:
            maker, between = passed_on(cut.ins[0], makers)
            if maker is None or maker.name not in PRODUCTS or maker.windowed or not contracted_axes(maker):
                continue
            (value,), passed = maker.outs, [cut, *between]
            if math.prod(value.shard) <= math.prod(cut.outs[0].shard):
                continue
            behind = body.ops[: body.ops.index(maker)]
            operands = set(maker.ins)
            ready = max((i + 1 for i, inner in enumerate(behind) if operands.intersection(inner.outs)), default=0)
            if not any(inner.name in PRODUCTS and operands.intersection(inner.ins) for inner in behind[ready:]):
                continue
            ahead = [inner for inner in body.ops[len(behind) + 1 :] if inner not in passed]
            whole = replace(value)
            passed[-1].ins = [whole]
            cut.ins = [*cut.ins, value]
            summed = Op("psum", [value], [whole], maker.path)
            body.ops = [*behind[:ready], maker, summed, *behind[ready:], *passed[::-1], *ahead]


def slices_of_stacks(loop: Op, makers: Mapping[Value, Op], find: Callable[[Value], Value]) -> Iterator[int]:
    """Yield the inputs of a backward loop's body, by number, that are slices of what another loop stacked.

    Args:
      loop: any operation.
      makers: what makes each array of the loop's region.
      find: gives the array whose memory a value is.
    """
    if loop.name != "scan" or "transpose" not in loop.path:
        return
    for number in range(sum(loop.counts), len(loop.ins)):
        maker = makers.get(find(loop.ins[number]))
        if maker is not None and maker.name == "scan" and number not in loop.unread and not loop.ins[number].on_host:
            yield number
