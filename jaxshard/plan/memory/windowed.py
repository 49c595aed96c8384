"""Gradients that TPUs sum over some of the mesh's axes part by part, in loops behind the backward pass.

Where the rows of a batch are split over the axes by which the gradient that a product makes of them is split, XLA's
partitioner computes one device's part in each turn of a loop, and sends the sum on to the next device (`windowed
einsum` in XLA's dot_handler.cc). Such a loop reads slices of one operand, from memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Op, Region, Value, contracted_axes
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.order import passed_on
from jaxshard.plan.memory.tiles import padded_bytes

RELAYOUT = "relayout"
"""A copy of an array in bf16, maybe with another dimension along the lanes of tiles."""

_FEWEST, _MOST = 5, 32
"""Sums over so many devices are done in such loops (`max_windowed_einsum_iteration`).

Among four the first and the last turn, which nothing runs beside, are half of what a loop sends.
"""


def sum_in_windows(
    region: Region, sizes: Mapping[str, int], *, chip: Chip | None = None, folded: frozenset[str] = frozenset()
) -> dict[Value, tuple[int, int]]:
    """Move products of gradients that are summed in loops behind the backward pass, and copy what they read to bf16.

    A turn takes a slice of the channels of a convolution's operand. If it is smaller with the rows along the lanes,
    the whole operand is copied to that layout.

    Args:
      region: a step whose gradients the compiler sums, or the body of a loop over micro-batches.
      sizes: of the mesh's axes.
      chip: a TPU; without one, a product is taken to last longer than sending its result.
      folded: the mesh's axes that cover several dimensions of a torus.

    Returns:
      The copies that convolutions read, and the dimensions that lie along their lanes and sublanes.
    """
    layouts: dict[Value, tuple[int, int]] = {}
    for inner in (inner for op in region.ops for inner in op.regions):
        layouts |= sum_in_windows(inner, sizes, chip=chip, folded=folded)
    loops = [one for one in _loops(region, sizes) if chip is None or _hides(one, chip, folded)]
    for loop in loops:
        loop.ops[0].windowed = True
    late, moved = {one.cut: one.ops for one in loops}, {op for one in loops for op in one.ops}
    copies, copied = _copy_sliced(region, loops)
    ops: list[Op] = []
    for op in region.ops:
        ops += [*copies.get(op, ()), *late.get(op, ()), *([] if op in moved else [op])]
    region.ops = ops
    return layouts | copied


class _Loop(NamedTuple):
    """A gradient that is summed in a loop.

    Attributes:
      cut: the constraint that splits it.
      ops: the product that makes it, and what passes its result on to the constraint.
      dim: the dimension that is split.
      axes: over which it is summed, and split.
      parts: so many parts it has.
    """

    cut: Op
    ops: list[Op]
    dim: int
    axes: set[str]
    parts: int


def _hides(loop: _Loop, chip: Chip, folded: frozenset[str]) -> bool:
    """True where a product takes so long that sending its parts beside it pays off; XLA leaves it whole else.

    Both times are in proportion to the result: what counts are the rows that a device has. A loop sends along one ring.
    Where a sum over devices would go along one, too, the product has to last as long as the first and the last turn's
    sending, beside which nothing runs; where that would take all links of several dimensions, as long as all of it.
    """
    product = loop.ops[0]
    if chip.network is None or product.name != "dot_general":
        return True
    (contracted, _), _ = product.params["dimension_numbers"]
    rows = math.prod(product.ins[0].shard[dim] for dim in contracted)
    several = len(loop.axes) > 1 or not folded.isdisjoint(loop.axes)
    links = 2 * (chip.network.dims if several else 1) * chip.network.bandwidth
    computes, sends = 2 * rows / chip.peak_flops, 2 / links  # seconds for each element, which has two bytes
    return bool(computes >= sends * (1 if several else 2 / loop.parts))


def _loops(region: Region, sizes: Mapping[str, int]) -> Iterator[_Loop]:
    makers = {one: op for op in region.ops for one in op.outs}
    found: set[Op] = set()
    for cut in region.ops:
        product, passed = passed_on(cut.ins[0], makers) if cut.name == "sharding_constraint" else (None, [])
        if product is None or product.name not in PRODUCTS or product in found or "transpose" not in product.path:
            continue
        axes = {axis for axis in contracted_axes(product) if sizes[axis] > 1}
        parts = math.prod(sizes[axis] for axis in axes)
        if not _FEWEST <= parts <= _MOST or len(cut.outs[0].shape) != len(product.outs[0].shape):
            continue
        split = [dim for dim, entry in enumerate(cut.outs[0].split) if axes.issubset(entry)]
        # Under ZeRO-1 a gradient is whole on each device before it is cut.
        if len(split) == 1 and all(op.name != "sharding_constraint" for op in passed):
            found.add(product)
            yield _Loop(cut, [product, *passed[::-1]], split[0], axes, parts)


def _copy_sliced(region: Region, loops: Sequence[_Loop]) -> tuple[dict[Op, list[Op]], dict[Value, tuple[int, int]]]:
    """Let the products in loops read copies of their operands, in bf16.

    Those of what the forward pass made are made as the backward pass begins. A convolution's have layouts of their own,
    a matrix product's are made of f32 operands.

    Returns:
      The copies by the operation before which they are made, and the layouts of what they make.
    """
    backward = next((op for op in region.ops if "transpose" in op.path), None)
    copies: dict[Op, list[Op]] = {}
    layouts: dict[Value, tuple[int, int]] = {}
    made: dict[tuple[Value, tuple[int, int] | None], Value] = {}
    for loop in loops:
        product = loop.ops[0]
        for operand, layout in list(_sliced(loop)):
            if (operand, layout) not in made:
                copy = replace(operand, dtype=jnp.dtype(jnp.bfloat16), role="", path=product.path)
                place = product if backward is None or "transpose" in operand.path else backward
                copies.setdefault(place, []).append(Op(RELAYOUT, [operand], [copy], product.path))
                made[operand, layout] = copy
                layouts |= {} if layout is None else {copy: layout}
            product.ins = [made[operand, layout] if one is operand else one for one in product.ins]
    return copies, layouts


def _sliced(loop: _Loop) -> Iterator[tuple[Value, tuple[int, int] | None]]:
    """Yield the operands that a loop reads copies of, with the copies' layouts; None for the usual one."""
    product, *passed = loop.ops
    if product.name == "dot_general":
        yield from ((one, None) for one in product.ins if one.dtype == jnp.float32)
    elif product.name == "conv_general_dilated" and all(op.name != "transpose" for op in passed):
        yield from zip(product.ins, _layouts(product, loop.dim, loop.parts), strict=True)


def _layouts(product: Op, split: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the dimensions along lanes and sublanes of a convolution's operands, of the one that is sliced the least.

    Args:
      product: the convolution.
      split: the dimension of its result that is split.
      parts: so many parts has that.
    """
    numbers = product.params["dimension_numbers"]
    for operand, dim, spec in zip(product.ins, numbers.out_spec, (numbers.lhs_spec, numbers.rhs_spec), strict=False):
        channels, rows = spec[:2]
        shape = list(operand.shard)
        shape[channels] //= parts if dim == split else 1
        layouts = [(rows, channels), (channels, rows)] if dim == split else [(channels, rows)]
        yield min(layouts, key=functools.partial(_bytes, tuple(shape)))


def _bytes(shape: tuple[int, ...], layout: tuple[int, int]) -> int:
    return padded_bytes(shape, jnp.dtype(jnp.bfloat16), *layout)
