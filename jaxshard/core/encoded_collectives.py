"""Sums and gathers over mesh axes that communicate arrays in a format of `js.wire`.

A reduce-scatter is an all-to-all of encoded parts, which each device decodes and adds in f32. An all-reduce is such a
reduce-scatter of the flat array and an all-gather of the encoded sums. Several axes are reduced one after another, so
that each level, inside a slice and across slices, moves fewer bytes; a sum is encoded again on each level:

    device 0 holds shares   a0 a1       all-to-all, int8      device 0 receives  a0 b0   and adds  a0 + b0   in f32
    device 1 holds shares   b0 b1     ------------------->    device 1 receives  a1 b1   and adds  a1 + b1

Each sum also returns this device's rounding errors, in the shape of its operand: the exact sum is the computed sum
plus the sum of all devices' errors.

An array that would not get smaller in the format (a few elements for each device) uses the native collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core import collectives
from jaxshard.core.encoding import carrier, decode, encode, from_bits, sent_of, shrinks, to_bits
from jaxshard.core.placement import split_dims
from jaxshard.core.wire import Format


class Summed(NamedTuple):
    """The result of a sum over devices that was communicated in a format of `js.wire`.

    Attributes:
      total: the sum, or this device's shard of it.
      error: f32 in the shape of the operand, this device's rounding error; an infinite or NaN error is set to zero.
    """

    total: jax.Array
    error: jax.Array


def scatter_sum(
    x: jax.Array, spec: PartitionSpec, axes: Sequence[str], wire: Format, dtype: Any, *, keep: Sequence[str] = ()
) -> Summed:
    """Sum the devices' arrays `x` over mesh axes in a format of `js.wire`; return this device's shard of the sum.

    It computes `collectives.scatter_sum` up to rounding.

    Args:
      x: f32, this device's summand, as large as the sum.
      spec: how to split the sum.
      axes: the mesh axes to sum over.
      wire: the format in which parts of `x` are sent.
      dtype: the dtype of the array before it was cast to f32. A part that has no fewer bytes in the format than in
        `dtype` is summed by the native collective, in f32.
      keep: axes of the spec that split `x` already and are left alone.

    Returns:
      (the shard of the sum, this device's rounding error in the shape of `x`).
    """
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    errors = []
    for dim, axis in split:
        if axis in axes:
            x, error = _scatter(x, dim, axis, wire, dtype)
        else:
            x, error = collectives.slice_shard(x, dim, axis), jnp.zeros_like(x)
        errors.append((dim, axis, error))
    x, error = all_sum(x, [axis for axis in axes if axis not in [name for _, name in split]], wire, dtype)
    # The errors of a later stage have the shape of this device's shard after the earlier stages.
    for dim, axis, earlier in reversed(errors):
        start = lax.axis_index(axis) * error.shape[dim]
        mine = lax.dynamic_slice_in_dim(earlier, start, error.shape[dim], dim) + error
        error = lax.dynamic_update_slice_in_dim(earlier, mine, start, dim)
    return Summed(x, error)


def all_sum(x: jax.Array, axes: Sequence[str], wire: Format, dtype: Any) -> Summed:
    """Sum the devices' f32 arrays `x` over mesh axes in a format of `js.wire`; every device gets the sum.

    Args:
      x: f32, this device's summand.
      axes: the mesh axes to sum over; the last axis is reduced first.
      wire: the format in which `x` is sent.
      dtype: the dtype of the array before it was cast to f32. If the array has no fewer bytes in the format than in
        `dtype`, the native collective sums it, in f32.

    Returns:
      (the sum, this device's rounding error in the shape of `x`).
    """
    axes = [axis for axis in axes if lax.axis_size(axis) > 1]
    if not axes:
        return Summed(x, jnp.zeros_like(x))
    *outer, axis = axes
    count = lax.axis_size(axis)
    if not shrinks(wire, -(-x.size // count), dtype):
        return Summed(collectives.all_sum(x, axes), jnp.zeros_like(x))
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)
    mine, errors = _exchange(flat, axis, wire)
    mine, error = all_sum(mine, outer, wire, dtype)
    sent = encode(mine, wire)
    whole = decode([lax.all_gather(one, axis) for one in sent], wire, mine.size)
    # All devices of the outer axes round the same sum here; only the first of them counts the error.
    first = jnp.bool_(True)
    for name in outer:
        first &= lax.axis_index(name) == 0
    error += jnp.where(first, _finite(mine - decode(sent, wire, mine.size)), 0.0)
    errors = errors.at[lax.axis_index(axis)].add(error)
    return Summed(*(one.reshape(-1)[: x.size].reshape(x.shape) for one in (whole, errors)))


def gather(x: jax.Array, spec: PartitionSpec, wire: Format, *, keep: Sequence[str] = ()) -> jax.Array:
    """All-gather an array from its shards in a format of `js.wire`; return it in f32.

    The shard is encoded once and sent over one axis after another. The device's own shard is encoded and decoded too,
    so that all devices get the same array.

    Args:
      x: this device's shard.
      spec: how the full array is split.
      wire: the format in which the shards are sent.
      keep: axes of the spec that are not gathered.
    """
    stages = [(dim, axis) for dim, axis in reversed(split_dims(spec)) if axis not in keep and lax.axis_size(axis) > 1]
    if not stages or not shrinks(wire, x.size, x.dtype):
        return collectives.gather(x, spec, keep=keep).astype(jnp.float32)
    sent = encode(x.reshape(-1), wire)
    for _, axis in stages:
        sent = [lax.all_gather(one, axis) for one in sent]
    whole = decode(sent, wire, x.size)
    whole = whole.reshape(*whole.shape[:-1], *x.shape)
    # The axis that was gathered first is the last leading dimension, and minor in the dimension that it splits.
    for left, (dim, _) in zip(reversed(range(len(stages))), stages, strict=True):
        whole = jnp.moveaxis(whole, left, left + dim)
        at = left + dim
        whole = whole.reshape(*whole.shape[:at], -1, *whole.shape[at + 2 :])
    return whole


def gather_bits(x: jax.Array, spec: PartitionSpec, dtype: Any, *, keep: Sequence[str] = ()) -> jax.Array:
    """All-gather an array from its shards in the floating type `dtype`, sent as integers with the same bits.

    Otherwise the CPU's compiler would cast bf16 to f32 for the gather.

    Args:
      x: this device's shard.
      spec: how the full array is split.
      dtype: the dtype to send, and of the result.
      keep: axes of the spec that are not gathered.
    """
    return from_bits(collectives.gather(to_bits(x.astype(dtype)), spec, keep=keep), dtype)


class Travel(NamedTuple):
    """A collective that a sum or a gather of this file issues.

    Attributes:
      kind: the name of the collective in compiled programs, such as "all-to-all".
      axes: the mesh axes of the collective.
      shape: the shape of its operand or its result on one device, whichever is larger.
      dtype: the dtype that is sent.
    """

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def list_scatter_sum(
    shape: tuple[int, ...],
    dtype: Any,
    spec: PartitionSpec,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    wire: Format,
    *,
    keep: Sequence[str],
) -> Iterator[Travel]:
    """List the collectives that `scatter_sum` issues, in their order, without running it.

    Args:
      shape: the shape of each device's array, as large as the sum.
      dtype: the dtype of the array. A part that has no fewer bytes in the format than in `dtype` is not encoded.
      spec: how the sum is split.
      axes: the mesh axes to sum over.
      sizes: the size of each mesh axis.
      wire: the format in which the arrays are sent.
      keep: axes of the spec that split the array already and are left alone.
    """
    left = list(shape)
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    for dim, axis in split:
        count, size = sizes[axis], math.prod(left)
        if axis in axes and count > 1:
            if shrinks(wire, size // count, dtype):
                yield from _list_encoded("all-to-all", axis, count, size // count, wire)
            else:
                yield Travel("reduce-scatter", (axis,), tuple(left), jnp.dtype(jnp.float32))
        left[dim] //= count
    yield from _list_all_sum(
        math.prod(left), dtype, [axis for axis in axes if axis not in [name for _, name in split]], sizes, wire
    )


def list_gather(
    shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int], wire: Format, *, keep: Sequence[str]
) -> Iterator[Travel]:
    """List the collectives that `gather` issues, in their order, without running it.

    Args:
      shape: the shape of each device's shard, which must have fewer bytes in the format.
      spec: how the full array is split.
      sizes: the size of each mesh axis.
      wire: the format in which the shards are sent.
      keep: axes of the spec that are not gathered.
    """
    count, size = 1, math.prod(shape)
    for _, axis in reversed(split_dims(spec)):
        if axis not in keep and sizes[axis] > 1:
            count *= sizes[axis]
            yield from _list_encoded("all-gather", axis, count, size, wire)


def _list_all_sum(
    size: int, dtype: Any, axes: Sequence[str], sizes: Mapping[str, int], wire: Format
) -> Iterator[Travel]:
    axes = [axis for axis in axes if sizes[axis] > 1]
    if not axes:
        return
    *outer, axis = axes
    count = sizes[axis]
    part = -(-size // count)
    if not shrinks(wire, part, dtype):
        yield Travel("all-reduce", tuple(axes), (size,), jnp.dtype(jnp.float32))
        return
    yield from _list_encoded("all-to-all", axis, count, part, wire)
    yield from _list_all_sum(part, dtype, outer, sizes, wire)
    yield from _list_encoded("all-gather", axis, count, part, wire)


def _list_encoded(kind: str, axis: str, count: int, size: int, wire: Format) -> Iterator[Travel]:
    for one in sent_of(wire, size).arrays:
        yield Travel(kind, (axis,), (count, *one.shape), carrier(one.dtype))


def _scatter(x: jax.Array, dim: int, axis: str, wire: Format, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Sum `x` over one axis and return (this device's shard of the sum along `dim`, the rounding error like `x`)."""
    count = lax.axis_size(axis)
    if count == 1:
        return x, jnp.zeros_like(x)
    if not shrinks(wire, x.size // count, dtype):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), jnp.zeros_like(x)
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]), dim, 0)
    total, errors = _exchange(parts.reshape(count, -1), axis, wire)
    return total.reshape(parts.shape[1:]), jnp.moveaxis(errors.reshape(parts.shape), 0, dim).reshape(x.shape)


def _exchange(parts: jax.Array, axis: str, wire: Format) -> tuple[jax.Array, jax.Array]:
    """Send row i of `parts` to device i of an axis, encoded, and add the rows that this device receives.

    Args:
      parts: f32[devices, size].
      axis: the mesh axis.
      wire: the format of `js.wire` in which rows are sent.

    Returns:
      (the sum of the received rows, f32[size]; the rounding errors of `parts`, f32[devices, size]).
    """
    sent = encode(parts, wire)
    received = [lax.all_to_all(one, axis, split_axis=0, concat_axis=0) for one in sent]
    size = parts.shape[-1]
    return decode(received, wire, size).sum(0), _finite(parts - decode(sent, wire, size))


def _finite(error: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(error), error, 0.0)
