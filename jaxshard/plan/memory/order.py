"""The order in which compilers run what a program leaves open."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from jaxshard.plan.memory.graph import Op, Region, Value, contracted_axes, dtype_bits, every_op
from jaxshard.plan.memory.shards import SCATTERS
from jaxshard.plan.memory.tiles import LANES, SUBLANES

SUMS = frozenset(("psum", "psum2", "psum_invariant", *SCATTERS))
"""Collectives that sum."""

_PASSED_ON = frozenset(
    {"enter", "enter_moved", "reshape", "transpose", "convert_element_type", "name", "sharding_constraint"}
)
"""Operations that pass an array on: in another form, or gathered by the compiler's choice."""


def join_scatters(region: Region, *, sums_apart: bool = False, elements: bool = False) -> None:
    """Let scatters write into what their result is added to: XLA turns x + scatter(zeros, ...) into scatter(x, ...).

    So the gradient of a table that is looked up and, as output matrix, multiplied is one array. Where the compiler
    chooses the collectives it sums the product over devices first, if the table is whole on each of them.

    Args:
      region: a step or the body of a loop.
      sums_apart: such a sum is one operation with what the chip computes meanwhile, from one array into another, as on
        TPUs without SparseCores.
      elements: join only scatters of one element at a time, such as the gradient of the labels' logits, as on GPUs.
    """
    for op in region.ops:
        for inner in op.regions:
            join_scatters(inner, sums_apart=sums_apart, elements=elements)
    makers = {one: op for op in region.ops for one in op.outs}
    uses = Counter(one for op in region.ops for one in op.ins)
    uses.update(region.outputs)
    joined: set[Op] = set()
    apart: list[Op] = []
    for op in region.ops:
        if op.name not in ("add", "add_any") or len(op.ins) != 2:
            continue
        for made, other in (op.ins, op.ins[::-1]):
            scatter = makers.get(made)
            if scatter is None or scatter.name not in ("scatter-add", "scatter_add") or uses[made] > 1:
                continue
            if elements and math.prod(scatter.ins[-1].shape) != math.prod(scatter.ins[1].shape[:-1]):
                continue
            zeros, whole = makers.get(scatter.ins[0]), made.shard == other.shard == op.outs[0].shard
            product = _summed_product(other, makers) if sums_apart and whole else None
            if product is not None:
                apart.append(product)
                break
            if zeros is not None and not zeros.ins and whole and made.dtype == other.dtype and scatter not in joined:
                op.name, op.params, op.ins = scatter.name, scatter.params, [other, *scatter.ins[1:]]
                joined.add(scatter)
                break
    region.ops = [op for op in region.ops if op not in joined]
    for product in apart:
        _sum(product, region)


def passed_on(value: Value, makers: Mapping[Value, Op]) -> tuple[Op | None, list[Op]]:
    """Return the operation that makes an array, and those that pass it on until it is this value, the last first."""
    passed: list[Op] = []
    while (op := makers.get(value)) is not None and op.name in _PASSED_ON and len(op.ins) == 1:
        passed.append(op)
        value = op.ins[0]
    return op, passed


def _summed_product(value: Value, makers: Mapping[Value, Op]) -> Op | None:
    """Return the product of which this is the result, if the compiler sums it over devices; None if it is no such."""
    op, _ = passed_on(value, makers)
    if op is None or op.name != "dot_general" or any(op.outs[0].split):
        return None
    return op if contracted_axes(op) else None


def _sum(product: Op, region: Region) -> None:
    """Sum a product's result over devices, into an array of its own."""
    (part,) = product.outs
    whole = replace(part)
    for op in region.ops:
        op.ins = [whole if one is part else one for one in op.ins]
    region.ops.insert(region.ops.index(product) + 1, Op("psum", [part], [whole], product.path))


def gather_late(region: Region) -> None:
    """Gather arguments where they are first read, in loops too, as far as the compiler chooses the gathers.

    A traced step has those of all weights in front of the model's first operation, and XLA's scheduler, which looks at
    memory, a table's where rows are looked up, then those of the blocks, then that of the output matrix. Collectives
    that the program itself states are begun earlier, beside what runs before.
    """
    ready, late = set(region.inputs), dict[Value, Op]()
    for op in region.ops:
        for inner in op.regions:
            gather_late(inner)
        if op.name in _PASSED_ON and ready.issuperset(op.ins) and len(op.ins) == len(op.outs) == 1:
            ready.update(op.outs)
            late[op.outs[0]] = op
    ordered: list[Op] = []

    def gather(value: Value) -> None:
        if (op := late.pop(value, None)) is not None:
            gather(op.ins[0])
            ordered.append(op)

    delayed = set(late.values())
    for op in region.ops:
        if op not in delayed:
            for one in op.ins:
                gather(one)
            ordered.append(op)
    for one in list(late):
        gather(one)
    region.ops = ordered


def scatter_whole(region: Region) -> None:
    """Scatter rows of all devices into a whole array, or gather them, where the array's rows are split over the same.

    The gradient of a table is split as the parameter is. Where fewer rows are added to it than it has, the compiler
    gathers these, and each device adds those of its part. Else each adds its rows to zeros of the whole size, all
    devices' arrays are summed, and each cuts its part.
    """
    for inner in (inner for op in region.ops for inner in op.regions):
        scatter_whole(inner)
    makers = {one: op for op in region.ops for one in op.outs}
    ops: list[Op] = []
    for op in region.ops:
        zeros = makers.get(op.ins[0]) if op.name in ("scatter-add", "scatter_add") else None
        if zeros is None or zeros.ins or not (axes := _rows_over(op)):
            ops.append(op)
            continue
        (part,), updates, numbers = op.outs, op.ins[-1], op.params["dimension_numbers"]
        added = math.prod(size for dim, size in enumerate(updates.shape) if dim not in numbers.update_window_dims)
        if added < math.prod(part.shape[dim] for dim in numbers.scatter_dims_to_operand_dims):
            gathered = _whole_over(axes, updates)
            op.ins = [*op.ins[:-1], gathered]
            ops += [Op("all_gather", [updates], [gathered], op.path), op]
            continue
        zeros.outs = [_whole_over(axes, op.ins[0])]
        op.ins, op.outs = [*zeros.outs, *op.ins[1:]], [_whole_over(axes, part)]
        ops += [op, Op("slice", op.outs, [part], op.path)]
    region.ops = ops


def _rows_over(scatter: Op) -> set[str]:
    """The axes over which both the rows that are added and those of the array that they are added to are split."""
    updates, numbers = scatter.ins[-1], scatter.params["dimension_numbers"]
    rows = {axis for dim, entry in enumerate(updates.split) if dim not in numbers.update_window_dims for axis in entry}
    return rows & {axis for dim in numbers.scatter_dims_to_operand_dims for axis in scatter.outs[0].split[dim]}


def _whole_over(axes: set[str], value: Value) -> Value:
    """The same array, not split over some axes."""
    split = tuple(tuple(axis for axis in entry if axis not in axes) for entry in value.split)
    sizes = zip(value.shape, value.shard, value.split, split, strict=True)
    return replace(value, split=split, shard=tuple(part if old == new else size for size, part, old, new in sizes))


def scatter_on_sparse_cores(region: Region) -> None:
    """Let scatters over some axes of the mesh be what they are, where parts fill more than one tile of a TPU.

    SparseCores run them beside other operations. Without them, over all devices at once, and for smaller parts, what
    runs there is an all-reduce, of which each device takes its part.
    """
    for op in every_op(region):
        if op.folded and op.name in SCATTERS and not op.everywhere and len(op.outs[0].shard) == 2:
            parts, wholes, packed = op.outs[0].shard, op.ins[0].shard, max(1, 32 // dtype_bits(op.outs[0].dtype))
            part, tile = (parts[0], SUBLANES * packed) if parts[0] < wholes[0] else (parts[1], LANES)
            op.folded = part % tile > 0 or part == tile
