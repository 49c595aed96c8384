"""A step as a graph of operations on one device's parts of arrays: what liveness is computed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.plan.memory.shards import Split

CUT = "cut"
"""The name of an operation that cuts a part out of a parameter when a step begins."""


@dataclass(eq=False)
class Value:
    """An array of the program.

    Attributes:
      shape: as the jaxpr has it: of one device over manual axes, whole over automatic ones.
      dtype: of its elements.
      split: over automatic axes.
      shard: the shape of one device's part.
      role: of an argument of the step; "" of what the step computes.
      path: the argument's path, or the name stack of the operation that makes it.
      on_host: it lies in the host's memory, as activations do that a remat policy offloads.
    """

    shape: tuple[int, ...]
    dtype: Any
    split: Split
    shard: tuple[int, ...]
    role: str = ""
    path: str = ""
    on_host: bool = False


@dataclass(eq=False)
class Region:
    """The body of a program, loop or branch.

    Attributes:
      inputs: its arguments; of a scan constants, carries, and slices of what is scanned over.
      ops: the operations in program order.
      outputs: its results; of a scan carries, and slices of what is stacked.
    """

    inputs: list[Value]
    ops: list[Op] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """An operation: an equation that is no call.

    Attributes:
      name: of its primitive.
      ins, outs: its operands (numbers left out) and results.
      path: its name stack: which function of the program it belongs to, "transpose" in backward passes.
      regions: the bodies of a loop or branch.
      counts: of a scan (constants, carries); of a while loop (constants of the condition, of the body).
      params: of the equation.
      unread: the operands, by number, that the body of a loop does not use.
      folded: a collective over an axis that covers several dimensions of a torus.
      everywhere: a collective over all axes of the mesh at once.
      summed: a product over a dimension that an axis splits which does not split the batch: activations to be summed.
      number: the only operand, if the program has it as a number; else None.
      windowed: a product that is computed and summed over devices part by part, in a loop (`windowed`).
    """

    name: str
    ins: list[Value]
    outs: list[Value]
    path: str = ""
    regions: list[Region] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    params: Mapping[str, Any] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    folded: bool = False
    everywhere: bool = False
    summed: bool = False
    number: Any = None
    windowed: bool = False

    @property
    def reads(self) -> list[Value]:
        """The operands without those that the body of a loop does not use."""
        return [one for i, one in enumerate(self.ins) if i not in self.unread]


def contracted_axes(product: Op) -> set[str]:
    """The axes that split the dimensions over which a product sums."""
    numbers = product.params["dimension_numbers"]
    features = product.name == "conv_general_dilated"
    contracted = ((numbers.lhs_spec[1],), (numbers.rhs_spec[1],)) if features else numbers[0]
    pairs = zip(product.ins, contracted, strict=False)
    return {axis for one, dims in pairs for dim in dims for axis in one.split[dim]}


def skip_round_trips(region: Region) -> None:
    """Let what reads an array that was converted to a wider type and back read the array itself, as compilers do."""
    source: dict[Value, Value] = {}
    same: dict[Value, Value] = {}
    for op in region.ops:
        op.ins = [same.get(one, one) for one in op.ins]
        for inner in op.regions:
            skip_round_trips(inner)
        if op.name != "convert_element_type" or len(op.ins) != 1:
            continue
        (narrow,), (made,) = op.ins, op.outs
        if narrow in source and source[narrow].dtype == made.dtype and source[narrow].shard == made.shard:
            same[made] = source[narrow]
        elif _holds(made.dtype, narrow.dtype):
            source[made] = narrow
    region.outputs = [same.get(one, one) for one in region.outputs]


def _holds(wide: Any, narrow: Any) -> bool:
    """True for a floating type that has all numbers of another one."""
    floating = all(jnp.issubdtype(one, jnp.floating) for one in (wide, narrow))
    return floating and wide != narrow and jnp.promote_types(wide, narrow) == wide


def eliminate(region: Region, wanted: set[Value]) -> None:
    """Drop operations whose results nobody reads, in loops too, as the compiler does."""
    needed = set(wanted)
    kept = []
    for op in reversed(region.ops):
        if not any(one in needed for one in op.outs) and not _has_effect(op):
            continue
        _eliminate_inside(op, needed)
        needed.update(op.reads)
        kept.append(op)
    region.ops = kept[::-1]


def _has_effect(op: Op) -> bool:
    return not op.outs


def _eliminate_inside(op: Op, needed: set[Value]) -> None:
    if op.name == "scan":
        consts, carries = op.counts
        (body,) = op.regions
        wanted = set(body.outputs[:carries])
        wanted |= {
            inner for inner, outer in zip(body.outputs[carries:], op.outs[carries:], strict=True) if outer in needed
        }
        eliminate(body, wanted)
        read = {one for inner in body.ops for one in inner.ins} | wanted
        op.unread = {i for i, one in enumerate(body.inputs) if one not in read and not consts <= i < consts + carries}
    elif op.name == "cond":
        for branch in op.regions:
            made = zip(branch.outputs, op.outs, strict=True)
            eliminate(branch, {inner for inner, outer in made if outer in needed})
    else:
        for inner in op.regions:
            eliminate(inner, set(inner.outputs))


def every_op(region: Region) -> Iterator[Op]:
    """Yield all operations, those of inner regions too."""
    for op in region.ops:
        yield op
        for inner in op.regions:
            yield from every_op(inner)


def dtype_bits(dtype: Any) -> int:
    """Return the bits of an element; those of the words of a typed random key."""
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 64
    return 0 if str(dtype) == "float0" else int(jax.dtypes.itemsize_bits(dtype))
