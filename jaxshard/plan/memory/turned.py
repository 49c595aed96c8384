"""Tables that a loop carries and its branches add to in two layouts: by rows, and as products write them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jaxshard.plan.memory.graph import Op, Region, Value, every_op
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.scattered import FUSES_UPDATE
from jaxshard.plan.memory.tiles import padded_bytes, tiled_bytes

_ELEMENTWISE = frozenset({"select_n", "convert_element_type", "transpose", "mul", "div"})
"""Operations that may lie between a gradient and the sum to which it is added."""


def added_in_turned_layouts(region: Region) -> dict[Op, tuple[int, ...]]:
    """Find additions to a carried table in branches that want it in different layouts, and the bytes of its copies.

    In a pipeline one branch adds the gradient of the logits' product to that of a tied table, another one that of the
    rows that were looked up. XLA for TPUs lets the product write the layout that takes least; rows are scattered with
    the table's width along the lanes. Where a width does not fill them the two differ: a branch then copies what it is
    given to its own layout and adds that to another array. A scatter that adds by itself does so to the copy.
    """
    copies: dict[Op, tuple[int, ...]] = {}
    for loop in every_op(region):
        if loop.name not in ("scan", "while"):
            continue
        found: defaultdict[tuple[int, ...], dict[Op, bool]] = defaultdict(dict)
        for op in loop.regions[-1].ops:
            for branch in op.regions if op.name == "cond" else ():
                for add, by_rows in _additions(branch):
                    found[add.outs[0].shard][add] = by_rows
        for adds in found.values():
            if len(set(adds.values())) == 2:
                copies |= {add: size for add, by_rows in adds.items() if (size := _copied(add, by_rows))}
    return copies


def _copied(add: Op, by_rows: bool) -> tuple[int, ...]:
    (made,) = add.outs
    rows, least = padded_bytes(made.shard, made.dtype, 1, 0), tiled_bytes(made.shard, made.dtype)
    if rows == least:
        return ()
    if add.name in FUSES_UPDATE:
        return (rows,)
    return (rows, rows) if by_rows else (least, least)


def _additions(branch: Region) -> Iterator[tuple[Op, bool]]:
    """Yield what a branch adds to the matrices that it is given, and whether that is scattered or a product."""
    makers = {one: op for op in branch.ops for one in op.outs}
    for out in branch.outputs:
        op = makers.get(out)
        if op is None or len(out.shard) != 2:
            continue
        if op.name in FUSES_UPDATE and op.ins[0] in branch.inputs:
            yield op, True
        elif op.name in ("add", "add_any") and any(one in branch.inputs for one in op.ins):
            added = {_made_by(one, makers) for one in op.ins}
            if len(names := added & (PRODUCTS | FUSES_UPDATE)) == 1:
                yield op, names <= FUSES_UPDATE


def _made_by(value: Value, makers: dict[Value, Op]) -> str:
    """The name of the operation that makes an array, but for a scale, a choice and a cast."""
    while (op := makers.get(value)) is not None and op.name in _ELEMENTWISE:
        same = [one for one in op.ins if len(one.shard) == 2 and one in makers]
        large = [one for one in same if makers[one].name != "broadcast_in_dim"]
        if len(large) != 1:
            break
        (value,) = large
    return "" if op is None else op.name
