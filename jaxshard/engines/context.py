"""Batches under `js.context`: separate inputs from labels, check positions, and take each device's positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.core.known_model import KnownModel
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size, mesh_inside
from jaxshard.core.placement import spec_entry
from jaxshard.core.strategy_parts import Context
from jaxshard.core.tree import map_with_path, path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.layers.positions import take_part


def split_batch(layout: Layout, model: KnownModel | None, batch: PyTree) -> PyTree:
    """Take this device's part of the sequence positions of every row, inside a `shard_map`.

    `js.context` splits positions over mesh axes: over 4 devices, tokens [rows, 64] become [rows, 16] on each device.
    Nothing is communicated, since batches are stored replicated over these axes. Without a `js.context`, or with one
    over a single device, return the batch unchanged.

    Args:
      layout: the layout, whose `js.context` names the axes.
      model: the known model of the loss, which separates inputs from labels before they are split
        (`KnownModel.separate_labels`); None for a loss of no known model.
      batch: this device's rows.
    """
    context = _in_force(layout)
    if context is None:
        return batch
    return _map_positions(context, prepare(layout, model, batch), lambda x, dim: take_part(x, dim, context.axis))


def split_shapes(layout: Layout, model: KnownModel | None, batch: PyTree) -> PyTree:
    """Return the shapes of the arrays that `split_batch` returns for this batch, without computing them."""
    context = _in_force(layout)
    if context is None:
        return batch
    size = axis_size(layout.mesh, context.axis)

    def part(x: Any, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]), x.dtype)

    return _map_positions(context, prepare(layout, model, batch), part)


def constrain_batch(layout: Layout, model: KnownModel | None, batch: PyTree) -> PyTree:
    """Constrain a global batch so that the axes of `js.context` split its sequence positions, in contiguous slices.

    Inputs are separated from labels first; see `prepare`. Without a `js.context` return the batch unchanged.
    """
    context = _in_force(layout)
    if context is None:
        return batch
    rows = layout.batch_axes

    def constrain(path: Any, x: jax.Array) -> jax.Array:
        entries = position_entries(layout, path, x.ndim)
        if not any(entries):
            return x
        if x.shape[0] % axis_size(layout.mesh, rows) == 0:  # not in evaluation of a few rows, one at a time
            entries[0] = spec_entry(rows)
        sharding = NamedSharding(mesh_inside(layout.mesh), PartitionSpec(*entries))
        spread: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
        return spread

    return map_with_path(constrain, prepare(layout, model, batch))


def position_entries(layout: Layout, path: Any, ndim: int) -> list[Any]:
    """Return the PartitionSpec entries of a batch array: the axes of `js.context` for its positions, None elsewhere.

    For tokens [rows, positions], for example, `[None, "context"]`.
    """
    context = _in_force(layout)
    dim = None if context is None else context.dim_of(path_str(path), ndim)
    return [spec_entry(context.axis) if context is not None and dim == one else None for one in range(ndim)]


def prepare(layout: Layout, model: KnownModel | None, batch: PyTree) -> PyTree:
    """Separate inputs from labels, and check that `js.context` can split the sequence positions of the batch.

    Without a `js.context` return the batch unchanged.

    Raises:
      ValueError: no array has positions; their number is no multiple of twice the number of devices; or an array that
        `js.context` does not name has a dimension of the same size, so that it may have positions too. The message
        names all such arrays.
    """
    context = _in_force(layout)
    if context is None:
        return batch
    if model is not None:
        batch = jax.eval_shape(model.separate_labels, batch) if _has_shapes(batch) else model.separate_labels(batch)
    _check(context, axis_size(layout.mesh, context.axis), batch)
    return batch


def _has_shapes(batch: PyTree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch))


def _in_force(layout: Layout) -> Context | None:
    """Return the layout's `js.context` if it splits positions over several devices, else None."""
    context = layout.context
    return context if context is not None and axis_size(layout.mesh, context.axis) > 1 else None


def _map_positions(context: Context, batch: PyTree, fn: Callable[[Any, int], Any]) -> PyTree:
    def apply(path: Any, x: Any) -> Any:
        dim = context.dim_of(path_str(path), np.ndim(x))
        return x if dim is None else fn(x, dim)

    return map_with_path(apply, batch)


def _check(context: Context, devices: int, batch: PyTree) -> None:
    found = {path_str(path): tuple(np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    dims = {path: dim for path, shape in found.items() if (dim := context.dim_of(path, len(shape))) is not None}
    listed = ", ".join(f"{path} {list(shape)}" for path, shape in found.items())
    if not dims:
        names = ", ".join(name for name, dim in context.dims if dim is not None)
        raise ValueError(
            f"context: no array of the batch has positions to split: it has {listed}, and js.context looks for {names}"
            '; name yours with their dimension: js.context(dims={"x": 1})'
        )
    axes, multiple = " x ".join(map(repr, context.axis)), 2 * devices
    raise_all(
        (
            f"{path}: {size} in dim {dim} of {list(found[path])}; " + _suggest(path, size, multiple)
            for path, dim in dims.items()
            if (size := found[path][dim]) % multiple
        ),
        ValueError,
        f"context: positions must be a multiple of {multiple}, two chunks for each of the {devices} devices of axis "
        f"{axes}",
    )
    lengths = {found[path][dim] for path, dim in dims.items()}
    named = {name for name, _ in context.dims}
    raise_all(
        (
            f"{path}: dim {dim} of {list(shape)}"
            for path, shape in found.items()
            if path not in dims and path.rsplit("/", 1)[-1] not in named
            for dim in range(1, len(shape))
            if shape[dim] in lengths
        ),
        ValueError,
        "context: arrays of the batch are as long as its positions, but js.context does not name them; name each with "
        'its dimension, or None if it has no positions: js.context(dims={"mask": 1, "table": None, ...})',
    )


def _suggest(path: str, size: int, multiple: int) -> str:
    if size > 1 and (size - 1) % multiple == 0:
        name = path.rsplit("/", 1)[-1]
        return (
            f"if its last is only a label, pass inputs and labels as separate arrays: "
            f'{{"{name}": {name}[:, :-1], "targets": {name}[:, 1:]}}'
        )
    return f"use {' or '.join(str(near) for near in (size - size % multiple, size + -size % multiple) if near)}"
