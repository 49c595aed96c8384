"""Collectives over the named axes of a `PartitionSpec`, inside `shard_map`.

Several axes take one collective each, never a joint one: one mesh axis per torus dimension then gives native
reduce-scatters on TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.placement import split_dims


def gather(x: jax.Array, spec: PartitionSpec, *, keep: Sequence[str] = ()) -> jax.Array:
    """All-gather an array from its shards, split as `spec` says.

    One all-gather per axis, minor axes first, so that the shards are joined in order. The last all-gather moves the
    bytes of the full array, earlier all-gathers move fewer.

    Args:
      x: this device's shard.
      spec: how the full array is split.
      keep: axes of the spec that are not gathered.
    """
    for dim, axis in reversed(split_dims(spec)):
        if axis not in keep:
            x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_sum(x: jax.Array, spec: PartitionSpec, axes: Sequence[str], *, keep: Sequence[str] = ()) -> jax.Array:
    """Sum the devices' arrays `x` over mesh axes and return this device's shard of the sum, split as `spec` says.

    Over axes of the spec that are in `axes`, `x` is reduce-scattered, major axes first. Over axes of the spec that are
    not in `axes`, `x` is sliced, because all devices along them hold the same array. Over `axes` that the spec lacks,
    `x` is all-reduced last, when it is smallest.

    Args:
      x: this device's summand, as large as the sum.
      spec: how to split the sum.
      axes: the mesh axes to sum over.
      keep: axes of the spec that split `x` already and are left alone.
    """
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    for dim, axis in split:
        if axis in axes:
            x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        else:
            x = slice_shard(x, dim, axis)
    return all_sum(x, [axis for axis in axes if axis not in [name for _, name in split]])


def slice_shard(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """Return this device's slice of `x`, with dimension `dim` split evenly over a mesh axis; communicate nothing."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def all_sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """All-reduce the sum of `x` over mesh axes; return `x` unchanged if `axes` is empty."""
    return lax.psum(x, tuple(axes)) if axes else x


def stack_totals(
    fn: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: Mesh
) -> jax.Array:
    """Compute the scalar `fn(x)` of each global array and return the scalars as one array [len(arrays)].

    Call it on global arrays, under `jax.jit`: the compiler adds the collectives. `specs` and `mesh` are not used.
    """
    del specs, mesh  # the compiler knows them
    return jnp.stack([fn(x) for x in arrays])


class Sums(NamedTuple):
    """Functions that add over devices: by native reductions (`NATIVE`), or in a fixed order (`ORDERED`).

    Attributes:
      scatter_sum: adds the devices' arrays and returns this device's shard of the sum; see `scatter_sum` of this file.
      all_sum: adds the devices' arrays and returns the sum on every device; see `all_sum`.
      stack_totals: reduces each global array to a scalar; see `stack_totals`.
      in_order: True if arrays are added in a fixed order, which gives the same bits for every number of processes.
    """

    scatter_sum: Callable[..., jax.Array]
    all_sum: Callable[[jax.Array, Sequence[str]], jax.Array]
    stack_totals: Callable[..., jax.Array]
    in_order: bool


NATIVE = Sums(scatter_sum, all_sum, stack_totals, in_order=False)
"""Adds in the order that the hardware prefers; `ordered_sums.ORDERED` adds in a fixed order."""


def sum_scalar(x: jax.Array, axes: Sequence[str], sums: Sums = NATIVE) -> jax.Array:
    """Sum a scalar (a part of a loss, a loss weight or a metric) over mesh axes; bf16 and f16 are added in f32."""
    if x.dtype in _NARROW and axes:
        # Also because the CPU compiler aborts on a manual bf16 sum when other axes are automatic (JAX 0.10 to 0.12).
        return sums.all_sum(x.astype(jnp.float32), axes).astype(x.dtype)
    return sums.all_sum(x, axes)


def all_max(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """All-reduce the maximum of `x` over mesh axes; return `x` unchanged if `axes` is empty."""
    if not axes:
        return x
    wide = {jnp.dtype(bool): jnp.int32}.get(x.dtype, jnp.float32 if x.dtype in _NARROW else x.dtype)
    largest: jax.Array = lax.pmax(x.astype(wide), tuple(axes)).astype(x.dtype)
    return largest


def average_scalar(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Average a floating scalar over mesh axes; return the maximum of an integer or a boolean."""
    if not axes:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return all_max(x, axes)
    mean: jax.Array = sum_scalar(x, axes) / lax.axis_size(tuple(axes))
    return mean


_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
