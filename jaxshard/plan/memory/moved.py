"""Reshapes that move elements on a TPU, and what compilers store because of them.

An array of [rows, positions, width] lies in tiles of 8 positions. Where the positions fill them, [rows x positions,
width] is the same memory; 196 positions do not, and the reshape is a copy. XLA moves such a reshape behind the
elementwise operations that follow it, as far as all they read was reshaped so. A product before it then writes each
result that is left there, and each is copied, where one copy of the product would do. What a loop is given, such as a
product that the forward pass kept, is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxshard.plan.memory.graph import Op, Value

_SUBLANES = 8

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Operations into which compilers fuse the elementwise operations that make their operands."""

COMPUTED_IN_F32 = frozenset({"erfc"})
"""Functions that are expanded to polynomials in f32: their operand is moved, converted, and not their result."""


def moves_elements(op: Op) -> bool:
    """Return True for a reshape that merges or splits a dimension along a tile's sublanes which does not fill them."""
    if op.name != "reshape":
        return False
    before, after = op.ins[0].shard, op.outs[0].shard
    if min(len(before), len(after)) < 2 or before[-1] != after[-1] or before[-2] == after[-2]:
        return False
    return min(before[-2], after[-2]) % _SUBLANES > 0 and 1 not in (before[-2], after[-2])


def written_apart(
    ops: Sequence[Op],
    readers: Mapping[Value, Sequence[Op]],
    find: Callable[[Value], Value],
    is_elementwise: Callable[[Op], bool],
) -> set[Value]:
    """Find the results behind a reshape that moves elements which a product writes each by itself.

    Args:
      ops: the operations of a region in order.
      readers: of each array, without operations that are the same memory.
      find: gives the array whose memory a value is.
      is_elementwise: true of an operation that can be computed where its result is read.
    """
    origin: dict[Value, Value] = {}
    products: set[Value] = set()
    for op in ops:
        if op.name in PRODUCTS or (is_elementwise(op) and any(find(one) in products for one in op.ins)):
            products.update(find(one) for one in op.outs)
        if moves_elements(op) and find(op.ins[0]) in products:
            origin.setdefault(find(op.outs[0]), find(op.outs[0]))
        elif is_elementwise(op) and len(op.outs) == 1:
            large = {find(one) for one in op.ins if one.shard == op.outs[0].shard}
            origins = {origin.get(one) for one in large}
            start = origins.pop() if len(origins) == 1 else None
            if start is not None:
                origin.setdefault(find(op.outs[0]), start)
    left: dict[Value, set[Value]] = {}
    for value, start in origin.items():
        if value is not start and any(is_elementwise(op) and find(op.outs[0]) not in origin for op in readers[value]):
            left.setdefault(start, set()).add(value)
    return set().union(*(found for found in left.values() if len(found) > 1))
