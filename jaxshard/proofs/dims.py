"""Follow a dimension of an operand into the results of an equation: the geometry that several proofs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxshard.core.primitives import ELEMENTWISE, SAME

FACTORIZATIONS = frozenset({
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal",
})  # fmt: skip
"""Linear algebra primitives that need all elements of a matrix, besides products."""

SCANNED = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
    "sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension",
}  # fmt: skip
"""Primitives that mix elements along one dimension and keep the others, and the parameter that names the dimension."""


def follow_dim(equation: Any, operand: int, dim: int) -> int | None:
    """Return the dimension of an equation's result that corresponds to a dimension of one of its operands.

    Two dimensions correspond if slice i of the result uses only slice i of this operand. For example, a transpose of
    [2, 3] to [3, 2] moves dimension 0 to dimension 1.

    Args:
      equation: the equation.
      operand: the index of the operand.
      dim: the dimension of the operand.

    Returns:
      The index of the result's dimension. None if there is none, because the equation sums over the dimension, cuts,
      merges, reverses or sorts it, or because its primitive is unknown.

    Example:
        # equation: c[8, 2, 5] = dot_general a[8, 2, 3] b[8, 3, 5], batched over dimension 0
        follow_dim(equation, 0, 1), follow_dim(equation, 1, 2), follow_dim(equation, 1, 1)      # (1, 2, None)
    """
    name, params = equation.primitive.name, equation.params
    if name in ELEMENTWISE or name in SAME:
        return dim
    if name in SCANNED or name == "concatenate":
        along = params[SCANNED.get(name, "dimension")] % len(equation.invars[operand].aval.shape)
        return dim if dim != along else None
    if name in FACTORIZATIONS:
        return dim if dim < len(equation.invars[0].aval.shape) - 2 else None
    if name.startswith("reduce") or name in ("argmax", "argmin"):
        axes = params.get("dimensions" if name == "reduce" else "axes")
        return None if axes is None else _without(axes, dim)  # windows (pooling) and reduce_scatter have no axes
    return _MOVES[name](equation, operand, dim) if name in _MOVES else None


def _without(gone: Any, dim: int) -> int | None:
    return None if dim in gone else dim - sum(other < dim for other in gone)


def _dot_general(equation: Any, operand: int, dim: int) -> int | None:
    contracted, batches = equation.params["dimension_numbers"]
    if dim in contracted[operand]:
        return None
    if dim in batches[operand]:
        return list(batches[operand]).index(dim)
    # The result has the batch dimensions, then the free ones of the left operand, then those of the right.
    summed = (*contracted[operand], *batches[operand])
    free = [other for other in range(len(equation.invars[operand].aval.shape)) if other not in summed]
    first = len(equation.outvars[0].aval.shape) - len(free) if operand else len(batches[0])
    return first + free.index(dim)


def _gather(equation: Any, operand: int, dim: int) -> int | None:
    numbers, x = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    # The dimensions of the result that come from the indices: one for each dimension of the indices except the last.
    of_indices = [other for other in range(len(equation.outvars[0].aval.shape)) if other not in numbers.offset_dims]
    if operand == 1:
        return of_indices[dim] if dim < len(of_indices) else None
    if dim in numbers.operand_batching_dims:
        return int(of_indices[numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(dim)]])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if dim in gone or dim in numbers.start_index_map or equation.params["slice_sizes"][dim] != x[dim]:
        return None
    kept = [other for other in range(len(x)) if other not in gone]
    return int(numbers.offset_dims[kept.index(dim)])


def _broadcast(equation: Any, operand: int, dim: int) -> int | None:
    to = int(equation.params["broadcast_dimensions"][dim])
    return to if equation.invars[0].aval.shape[dim] == equation.outvars[0].aval.shape[to] else None


def _reshape(equation: Any, operand: int, dim: int) -> int | None:
    x, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if equation.params.get("dimensions") is not None:
        return None
    # A dimension stays itself in a reshape if equally many elements come before it and its size is the same.
    before = math.prod(x[:dim])
    fits = (place for place in range(len(out)) if math.prod(out[:place]) == before and out[place] == x[dim])
    return next(fits, None)


def _transpose(equation: Any, operand: int, dim: int) -> int | None:
    return list(equation.params["permutation"]).index(dim)


def _squeeze(equation: Any, operand: int, dim: int) -> int | None:
    return _without(equation.params["dimensions"], dim)


def _slice(equation: Any, operand: int, dim: int) -> int | None:
    """Return `dim` if a slice, or the update of a slice, spans the full dimension; None if it cuts the dimension."""
    sizes = {x.aval.shape[dim] for x in (*equation.invars, *equation.outvars) if x.aval.shape}
    return dim if len(sizes) == 1 and not equation.params.get("strides") else None


def _pad(equation: Any, operand: int, dim: int) -> int | None:
    return dim if tuple(equation.params["padding_config"][dim]) == (0, 0, 0) else None


def _reverse(equation: Any, operand: int, dim: int) -> int | None:
    return dim if dim not in equation.params["dimensions"] else None


_MOVES: dict[str, Callable[[Any, int, int], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
