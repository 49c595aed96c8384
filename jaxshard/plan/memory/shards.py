"""Shardings over automatic mesh axes: propagated forward, from a program's arguments and constraints.

Inside a `shard_map` the shapes of a jaxpr are already those of one device, as far as its manual axes go. Over the other
axes the compiler chooses the sharding of every value without a constraint. One pass forward models that choice: a
product keeps the splits of its free and batch dimensions, an elementwise result those of its operands, a reshape those
of the dimensions that stay. A value for which there is no rule is replicated.

A split is a tuple with the names of mesh axes for each dimension: ((), ("data",)) is a matrix whose columns are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Split = tuple[tuple[str, ...], ...]
"""For each dimension of an array the mesh axes that split it."""

COLLECTIVES = frozenset({
    "all_gather", "psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "pmax",
    "pmin", "ragged_all_to_all", "all_gather_invariant",
})  # fmt: skip
"""Primitives of the collectives that the traced program issues itself."""


def replicated(shape: Sequence[int]) -> Split:
    """Return the split (mesh axes of each dimension) of a replicated array: ((), ()) for a matrix."""
    return ((),) * len(shape)


def spec_split(spec: Any, ndim: int, among: frozenset[str]) -> Split:
    """Convert a PartitionSpec to a tuple of mesh axes for each of `ndim` dimensions, with only the axes in `among`."""
    entries = [() if one is None else one if isinstance(one, tuple) else (one,) for one in tuple(spec)]
    entries += [()] * (ndim - len(entries))
    return tuple(tuple(axis for axis in one if isinstance(axis, str) and axis in among) for one in entries[:ndim])


def merge(splits: Sequence[Split]) -> Split:
    """Merge the splits (mesh axes of each dimension) of equally shaped operands into that of an elementwise result.

    For each dimension it takes the first operand's mesh axes that split no earlier dimension of the result.
    """
    used: set[str] = set()
    joined = []
    for entries in zip(*splits, strict=True):
        entry = next((one for one in entries if one and not used & set(one)), ())
        used |= set(entry)
        joined.append(entry)
    return tuple(joined)


def propagate(name: str, params: Mapping[str, Any], operands: Sequence[tuple[Split, Any]], shape: Any) -> Split:
    """Return the mesh axes that split each dimension of an equation's result.

    Args:
      name: the name of the primitive.
      params: the parameters of the equation.
      operands: (split, shape) of each operand; a split has the mesh axes of each dimension.
      shape: the shape of the result.
    """
    if not any(any(split) for split, _ in operands):
        return replicated(shape)
    if (rule := _RULES.get(name)) is not None:
        return _valid(rule(params, operands, shape), shape)
    same_rank = [one for one in operands if len(one[1]) == len(shape)]
    if same_rank and not is_reduction(name):
        # Elementwise operations, whose operands of size one are broadcast, and operations along some dimensions.
        return merge(
            [
                tuple(entry if size > 1 < its else () for entry, its, size in zip(split, old, shape, strict=True))
                for split, old in same_rank
            ]
        )
    reduced = params.get("axes")
    if reduced is not None and is_reduction(name):
        split = operands[0][0]
        kept = tuple(entry for dim, entry in enumerate(split) if dim not in reduced)
        return kept if len(kept) == len(shape) else replicated(shape)
    return replicated(shape)


def is_reduction(name: str) -> bool:
    """Return True for primitives that reduce dimensions: sums, maxima, argmax and the like."""
    return name.startswith(("reduce_", "arg")) and not name.startswith(("reduce_precision", "reduce_window"))


def _valid(split: Split, shape: Sequence[int]) -> Split:
    used: set[str] = set()
    out = []
    for entry in split:
        entry = tuple(axis for axis in entry if axis not in used)
        used |= set(entry)
        out.append(entry)
    return tuple(out) if len(out) == len(shape) else replicated(shape)


def _dot(params: Any, operands: Any, shape: Any) -> Split:
    (left_contract, right_contract), (left_batch, right_batch) = params["dimension_numbers"]
    (left, _), (right, _) = operands[:2]
    batch = [left[a] or right[b] for a, b in zip(left_batch, right_batch, strict=True)]
    rows = [entry for dim, entry in enumerate(left) if dim not in (*left_contract, *left_batch)]
    columns = [entry for dim, entry in enumerate(right) if dim not in (*right_contract, *right_batch)]
    return (*batch, *rows, *columns)


def _broadcast(params: Any, operands: Any, shape: Any) -> Split:
    split, its = operands[0]
    out: list[tuple[str, ...]] = [()] * len(shape)
    for source, dim in enumerate(params["broadcast_dimensions"]):
        if its[source] == shape[dim]:
            out[dim] = split[source]
    return tuple(out)


def _transpose(params: Any, operands: Any, shape: Any) -> Split:
    return tuple(operands[0][0][dim] for dim in params["permutation"])


def _reshape(params: Any, operands: Any, shape: Any) -> Split:
    """Return the split of a reshape's result, by groups of dimensions of equal size, such as [4, 8] and [32].

    The first split dimension of a group in the operand gives its mesh axes to one dimension of the result's group.
    """
    split, its = operands[0]
    out: list[tuple[str, ...]] = [()] * len(shape)
    i = j = 0
    while i < len(its) and j < len(shape):
        source, target = [i], [j]
        left, right = its[i], shape[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(its):
                left *= its[i]
                source.append(i)
                i += 1
            elif left > right and j < len(shape):
                right *= shape[j]
                target.append(j)
                j += 1
            else:
                return tuple(out)
        entries = [split[dim] for dim in source if its[dim] > 1]
        axes = next((one for one in entries if one), ())
        # The axes go to a dimension with the size of the one that they split, or else to the outermost dimension.
        if axes:
            size = next(its[dim] for dim in source if split[dim] == axes)
            equal = [dim for dim in target if shape[dim] == size]
            large = [dim for dim in target if shape[dim] > 1]
            out[(equal or large or target)[0]] = axes
    return tuple(out)


def _same_size(params: Any, operands: Any, shape: Any) -> Split:
    """Return the operand's split for a slice or pad; a dimension that is cut to a single element is not split."""
    split, its = operands[0]
    if len(its) != len(shape):
        return replicated(shape)
    return tuple(entry if size == old or size > 1 else () for entry, size, old in zip(split, shape, its, strict=True))


def _drop(params: Any, operands: Any, shape: Any) -> Split:
    split = operands[0][0]
    dims = params.get("dimensions", ())
    return tuple(entry for dim, entry in enumerate(split) if dim not in dims)


def _expand(params: Any, operands: Any, shape: Any) -> Split:
    entries = list(operands[0][0])
    for dim in sorted(params["dimensions"]):
        entries.insert(dim, ())
    return tuple(entries)


def _concatenate(params: Any, operands: Any, shape: Any) -> Split:
    return merge([split for split, _ in operands])


def _gather(params: Any, operands: Any, shape: Any) -> Split:
    (split, its), (indices, _) = operands[:2]
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    skipped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [dim for dim in range(len(its)) if dim not in skipped]
    out: list[tuple[str, ...]] = [()] * len(shape)
    for place, dim in zip(numbers.offset_dims, windows, strict=True):
        out[place] = split[dim] if sizes[dim] == its[dim] else ()
    rows = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    for place, entry in zip(rows, indices[:-1], strict=False):
        out[place] = entry
    return tuple(out)


def _scatter(params: Any, operands: Any, shape: Any) -> Split:
    (split, its), (updates, updated) = operands[0], operands[2]
    numbers = params["dimension_numbers"]
    out = list(split)
    for dim, place in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        out[dim] = out[dim] or operands[1][0][place]
    skipped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [dim for dim in range(len(its)) if dim not in skipped]
    for place, dim in zip(numbers.update_window_dims, windows, strict=True):
        if not out[dim] and updated[place] == its[dim]:
            out[dim] = updates[place]
    return tuple(out)


def _convolution(params: Any, operands: Any, shape: Any) -> Split:
    numbers = params["dimension_numbers"]
    (left, _), (right, _) = operands[:2]
    out: list[tuple[str, ...]] = [()] * len(shape)
    out[numbers.out_spec[0]] = left[numbers.lhs_spec[0]]
    out[numbers.out_spec[1]] = right[numbers.rhs_spec[0]]
    for place, dim in zip(numbers.out_spec[2:], numbers.lhs_spec[2:], strict=True):
        out[place] = left[dim]
    return tuple(out)


_RULES: dict[str, Callable[[Any, Any, Any], Split]] = {
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "slice": _same_size,
    "dynamic_slice": _same_size,
    "pad": _same_size,
    "squeeze": _drop,
    "expand_dims": _expand,
    "concatenate": _concatenate,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "conv_general_dilated": _convolution,
}


def shard_shape(shape: Sequence[int], split: Split, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one device's part of an array; dimensions that don't divide evenly are rounded up."""
    return tuple(
        -(-size // math.prod(sizes[axis] for axis in entry)) if entry else size
        for size, entry in zip(shape, split, strict=True)
    )
