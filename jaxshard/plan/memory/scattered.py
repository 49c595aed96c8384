"""Scatters, and gathers of elements: which are selections, which a TPU does in one dimension, which are summed."""

from __future__ import annotations

import math
from typing import Any

from jaxshard.plan.memory.graph import Op

FUSES_UPDATE = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
"""Operations that write into their first operand where nothing else needs it."""

_LINEAR = 1024
"""A scatter of so many elements, a tile of an array with one dimension, is done in such an array."""


def is_selection(op: Op) -> bool:
    """Return True for a scatter of one element per row, the gradient of `take_along_axis`, which is a selection.

    It is none along an only row: that dimension of size one is a window of the scatter then.
    """
    if not op.name.startswith("scatter"):
        return False
    numbers: Any = op.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return not numbers.update_window_dims
    made, updates = op.outs[0].shape, op.ins[-1].shape
    one_per_row = bool(made) and math.prod(updates) * made[-1] == math.prod(made)
    return one_per_row and not numbers.update_window_dims


def keeps_type(op: Op) -> bool:
    """Return True for a scatter of elements that writes the type to which it adds, whatever type is read then."""
    return _scatters_elements(op) and not is_linear(op)


def is_linear(op: Op) -> bool:
    """Return True for a scatter of elements on an array that is copied into one of one dimension, and back.

    What comes back has the type in which it is read.
    """
    return _scatters_elements(op) and math.prod(op.ins[-1].shard) >= _LINEAR


def _scatters_elements(op: Op) -> bool:
    if not op.name.startswith("scatter") or is_selection(op):
        return False
    numbers: Any = op.params["dimension_numbers"]
    return bool(numbers.operand_batching_dims)


def is_summed_gather(op: Op) -> bool:
    """Return True for a gather of single elements along a dimension that an axis splits: one device has each."""
    if op.name != "gather" or math.prod(op.params["slice_sizes"]) != 1:
        return False
    return any(op.ins[0].split[dim] for dim in op.params["dimension_numbers"].collapsed_slice_dims)


def is_gather_from_one_row(op: Op) -> bool:
    """Return True for a gather of single elements from rows of which the compiler leaves each device one."""
    if op.name != "gather" or math.prod(op.params["slice_sizes"]) != 1:
        return False
    return op.ins[0].shape[0] > op.ins[0].shard[0] == 1
