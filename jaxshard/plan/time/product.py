"""Measure one matrix product of a step: its FLOPs, bytes and dimensions on one device.

A TPU's matrix unit multiplies tiles of 128 or 256 rows and columns. If the contracted or an output dimension is
smaller, such as the 128 of an attention head on a v6e, a part of the unit is idle
(jax-ml.github.io/scaling-book/tpus).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jaxshard.core.compat import contracted_kernel_dims
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.tree import bytes_of
from jaxshard.plan.memory.graph import Op, Value

Dims = tuple[int, int, int]
"""Rows, contracted elements and columns of a product."""


class Product(NamedTuple):
    """The matrix products that one operation computes each time it runs.

    Attributes:
      kernel: the name of a Pallas or cuDNN kernel; "" for a kernel without a name, and for a plain product.
      shapes: the shapes of the operands, such as "[24576, 4096] x [4096, 14336]".
      dtype: the dtype of the operand with more bits.
      passes: the number of bf16 passes that a TPU needs at the product's precision.
      flops: the number of FLOPs, two for every multiply-add.
      bytes: the bytes of operands and results.
      parts: the FLOPs and dimensions of each product; a kernel may have several.
    """

    kernel: str
    shapes: str
    dtype: str
    passes: int
    flops: float
    bytes: float
    parts: tuple[tuple[float, Dims], ...] = ()

    def fill(self, unit: int) -> float:
        """Return the share of a matrix unit with `unit` rows and columns that the products fill, weighted by FLOPs."""
        busy = sum(flops / fill(dims, unit) for flops, dims in self.parts)
        return sum(flops for flops, _ in self.parts) / busy if busy else 1.0


def fill(dims: Dims, unit: int) -> float:
    """Return the share of a TPU's matrix unit that a product of the dimensions (rows, contracted, columns) fills.

    The unit holds a tile of one operand. The other operand streams through it, along the longer outer dimension.

    >>> fill((8192, 128, 8192), 256), fill((8192, 4096, 14336), 128)
    (0.5, 1.0)
    """
    rows, contracted, columns = dims
    held = (contracted, min(rows, columns)) if unit else ()
    return math.prod(size / (math.ceil(size / unit) * unit) for size in held)


def product_of(op: Op, visited: float = 1.0) -> Product | None:
    """Return the matrix products that an operation computes; None if it computes none.

    Args:
      op: an operation of the graph of a step.
      visited: the share of a Pallas kernel's grid points that are computed; a mask may skip the others.
    """
    ins, outs = ([jax.ShapeDtypeStruct(one.shard, one.dtype) for one in some] for some in (op.ins, op.outs))
    if op.name == "pallas_call":
        return _kernel(op, visited)
    if op.name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"):
        return _cudnn(op)
    return _product(op.name, op.params, ins, outs)


def device_bytes(*values: Value) -> int:
    """Return the sum of the bytes of values on one device."""
    return sum(0 if one.dtype is None else bytes_of(one.shard, one.dtype) for one in values)


def _product(name: str, params: Mapping[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Product | None:
    """Return the matrix product that a primitive computes from `ins`; None for a primitive that is no product."""
    groups = 1
    match name:
        case "dot_general":
            (left, right), (batch, _) = params["dimension_numbers"]
        case "ragged_dot_general":
            numbers = params["ragged_dot_dimension_numbers"]
            (left, right), (batch, _) = numbers.dot_dimension_numbers
            # If the rows of all groups are contracted, each group's result comes from its own rows alone.
            groups = outs[0].shape[0] if set(numbers.lhs_ragged_dimensions) & set(left) else 1
        case "conv_general_dilated":
            left, right, batch = (), contracted_kernel_dims(dict(params)), ()
        case _:
            return None
    a, b, out = *ins[:2], outs[0]
    contracted = math.prod(b.shape[dim] for dim in right)
    if left:  # if only one operand is split there, each device uses its part of the other
        contracted = min(contracted, math.prod(a.shape[dim] for dim in left))
    many = math.prod(a.shape[dim] for dim in batch)
    rows = max(1, math.prod(a.shape) // (many * (contracted if left else 1)))
    size = math.prod(out.shape)
    columns = max(1, size // (many * rows)) if left else out.shape[-1]
    flops = 2.0 * size * contracted / groups
    moved = sum(bytes_of(one.shape, one.dtype) for one in (a, b, out)) / groups
    dtype = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
    shapes = f"{list(a.shape)} x {list(b.shape)}"
    return Product("", shapes, str(dtype), _passes(params), flops, moved, ((flops, (rows, contracted, columns)),))


def _kernel(op: Op, visited: float) -> Product | None:
    """Return the products of a Pallas kernel: the products in its body, times the number of computed grid points."""
    body = list(_in_kernel(open_jaxpr(op.params["jaxpr"])[0]))
    estimate = op.params.get("cost_estimate")
    if estimate is None and not body:
        return None
    grid = math.prod(size for size in op.params["grid_mapping"].grid if isinstance(size, int))
    flops = grid * sum(one.flops for one in body) * visited if estimate is None else float(estimate.flops)
    return Product(
        str(op.params.get("name") or ""),
        " x ".join(str(list(one.shard)) for one in op.ins if len(one.shard) > 2),
        body[0].dtype if body else "bfloat16",
        max((one.passes for one in body), default=1),
        flops,
        device_bytes(*op.ins, *op.outs),
        tuple(part for one in body for part in one.parts),
    )


def _in_kernel(jaxpr: Any) -> Iterable[Product]:
    """Yield the products in a kernel's body; of a conditional only the products in the most expensive branch."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        avals = ([var.aval for var in some] for some in (equation.invars, equation.outvars))
        if (one := _product(name, params, *avals)) is not None:
            yield one
            continue
        inner = [list(_in_kernel(open_jaxpr(program)[0])) for program in jaxprs_in_params(params)]
        if name == "cond":
            inner = [max(inner, key=lambda ones: sum(one.flops for one in ones))]
        yield from (one for ones in inner for one in ones * int(params.get("length", 1)))


def _cudnn(op: Op) -> Product:
    """Return the products of cuDNN's attention kernel: two forward, five backward; half the FLOPs if causal."""
    query, key = op.ins[:2]
    forward = op.name == "dot_product_attention_fwd_wrapper"
    # Undocumented: the layout BTNH and the mask types of jax._src.cudnn.fused_attention_stablehlo.
    share = 0.5 if "CAUSAL" in str(op.params.get("mask_type", "")) else 1.0
    flops = 2.0 * math.prod(query.shard) * key.shard[-3] * (2 if forward else 5) * share
    name, shapes = f"cudnn attention, {'forward' if forward else 'backward'}", f"{[*query.shard]} x {[*key.shard]}"
    return Product(name, shapes, str(query.dtype), 1, flops, device_bytes(*op.ins, *op.outs) * share)


def _passes(params: Mapping[str, Any]) -> int:
    """Return the number of bf16 passes that a TPU needs for a product of the precision in `params`."""
    names = str(params.get("precision")).upper()
    return 6 if "HIGHEST" in names else 3 if "HIGH" in names else 1
