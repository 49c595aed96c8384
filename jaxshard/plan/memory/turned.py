"""Tables in two layouts: the one that takes least, and by rows, in which rows are looked up and scattered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxshard.plan.memory.graph import Op, Region, Value, every_op
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.scattered import FUSES_UPDATE
from jaxshard.plan.memory.shards import SCATTERS
from jaxshard.plan.memory.tiles import LANES, padded_bytes, tiled_bytes

_ELEMENTWISE = frozenset({"select_n", "convert_element_type", "transpose", "mul", "div"})
"""Operations that may lie between a gradient and the sum to which it is added."""

_UNTIL_SCATTERED = frozenset({"convert_element_type", "optimization_barrier", *SCATTERS})
"""Operations between the whole gradient of a table and a device's part of it."""


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


def _copied(add: Op, scattered: bool) -> tuple[int, ...]:
    rows, least = _layouts(add.outs[0])
    if rows == least:
        return ()
    if add.name in FUSES_UPDATE:
        return (rows,)
    return (rows, rows) if scattered else (least, least)


def _layouts(table: Value) -> tuple[int, int]:
    """The bytes of a table with its width along the lanes, and in the layout that takes least."""
    return padded_bytes(table.shard, table.dtype, 1, 0), tiled_bytes(table.shard, table.dtype)


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


class Lookup(NamedTuple):
    """Rows of a table that are looked up, and what else is read so.

    Attributes:
      gather: the operation that looks rows up.
      state: the optimizer's state that the update reads in the same layout.
    """

    gather: Op
    state: list[Value]


def looked_up_by_rows(region: Region) -> dict[Value, Lookup]:
    """Find tables of a step whose rows are looked up, and the state of which the update reads in the same layout.

    The argument lies in the layout that takes least. Rows are looked up, and scattered, with the width along the lanes:
    where it does not fill them all of the step reads a copy by rows. Where the whole gradient is there, which a scatter
    made, the update is computed so, too, with copies of the optimizer's state.
    """
    makers = {one: op for op in region.ops for one in op.outs}
    found: dict[Value, Lookup] = {}
    scattered = {op.outs[0].shard for op in region.ops if op.name in FUSES_UPDATE}
    for op in region.ops:
        table = _argument(op.ins[0], makers) if op.name == "gather" else None
        if table is None or table.role != "parameters" or len(table.shard) != 2:
            continue
        rows, least = _layouts(table)
        if rows == least:
            continue
        name = table.path.partition("/")[2]
        state = [one for one in region.inputs if one.role == "optimizer state" and one.path.endswith("/" + name)]
        alike = [one for one in state if one.shard == table.shard]
        found[table] = Lookup(op, alike if table.shard in scattered else [])
    return found


def updated_by_rows(region: Region) -> Iterator[tuple[Value, Op | None]]:
    """Find the parts of tables, and of their state, that the update reads in the layout in which rows are scattered.

    Each device has some columns of such a table. More than an eighth of the lanes have to be filled; of less the
    gradient is copied. Where the compiler splits them over the axes that split the batch, it gathers the columns where
    rows are looked up, and scatters the gradient into those: copies are made as early as what loops stack. Where the
    program scatters the whole gradient over devices, they are made beside that.

    Args:
      region: a step.

    Returns:
      The arrays, each with the operation that adds rows to the whole gradient, or None for copies from the start.
    """
    rows_over = {axis for one in region.inputs if one.role == "batch" for entry in one.split for axis in entry}
    scattered = {op.outs[0].shard for op in region.ops if op.name in FUSES_UPDATE}
    behind = _scattered_by_columns(region)
    for table in region.inputs:
        columns = table.role == "parameters" and len(table.split) == 2 and not table.split[0] and any(table.split[1])
        if not columns or 8 * table.shard[1] <= LANES or len(set(_layouts(table))) == 1:
            continue
        chosen = set(table.split[1]) == rows_over and table.shard in scattered
        if chosen or table.shard in behind:
            name = table.path.partition("/")[2]
            alike = [one for one in region.inputs if one.path.endswith("/" + name) and one.shard == table.shard]
            roles = ("parameters", "optimizer state")
            yield from ((one, None if chosen else behind[table.shard]) for one in alike if one.role in roles)


def _scattered_by_columns(region: Region) -> dict[tuple[int, ...], Op]:
    """The shapes of parts by columns that a program scatters of what rows are added to, and what adds the rows."""
    readers: defaultdict[Value, list[Op]] = defaultdict(list)
    for op in region.ops:
        for one in op.ins:
            readers[one].append(op)
    found: dict[tuple[int, ...], Op] = {}
    for op in region.ops:
        if op.name in FUSES_UPDATE and len(op.outs[0].shard) == 2:
            one = whole = op.outs[0]
            while one.shard == whole.shard and len(readers[one]) == 1 and readers[one][0].name in _UNTIL_SCATTERED:
                one = readers[one][0].outs[readers[one][0].ins.index(one)]
            if one.shard[0] == whole.shard[0] and one.shard[1] < whole.shard[1]:
                found[one.shard] = op
    return found


def by_rows(table: Value) -> Value:
    """A copy of a table with its width along the lanes."""
    rows, width = table.shard
    shape = (rows, width + -width % LANES)
    return replace(table, shape=shape, shard=shape, split=((), ()), role="")


def _argument(value: Value, makers: dict[Value, Op]) -> Value | None:
    while (op := makers.get(value)) is not None and op.name in ("convert_element_type", "enter", "pvary"):
        value = op.ins[0]
    return value if op is None else None
