"""Sums over mesh axes in a fixed order: the same bits from 1 process of 8 devices as from 4 processes of 2.

A native reduction adds in an order that depends on the hardware. Here devices exchange the unreduced parts, and each
device adds the parts of its shard of the sum, in the order of the devices in the mesh:

    device 0 holds shares   a0 a1        all-to-all       device 0 receives  a0 b0   and adds  a0 + b0
    device 1 holds shares   b0 b1      -------------->    device 1 receives  a1 b1   and adds  a1 + b1

Sums of integers are exact in any order, so they use native reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Num

from jaxshard.core.collectives import Sums, slice_shard
from jaxshard.core.placement import axes_of, split_dims


def pairwise_sum(parts: Num[Array, " n *dims"]) -> Num[Array, "*dims"]:
    """Add n arrays in pairs, in an order that depends on n alone: four arrays as (0 + 2) + (1 + 3).

    In each round array i is added to array i + n // 2, and an odd last array waits for the next round. bf16 and f16 are
    added in f32.

    Args:
      parts: the arrays, [n, ...].
    """
    dtype = parts.dtype
    parts = parts.astype(jnp.promote_types(dtype, jnp.float32))
    while len(parts) > 1:
        half = len(parts) // 2
        sums = parts[:half] + parts[half : 2 * half]
        parts = jnp.concatenate([sums, parts[2 * half :]]) if len(parts) % 2 else sums
    return parts[0].astype(dtype)


def scatter_sum(x: jax.Array, spec: PartitionSpec, axes: Sequence[str], *, keep: Sequence[str] = ()) -> jax.Array:
    """Sum the devices' arrays `x` over mesh axes in a fixed order; return this device's shard of the sum.

    It computes what `collectives.scatter_sum` computes. An all-to-all replaces each reduce-scatter. It moves the same
    bytes, but its result is as large as its operand, while a reduce-scatter returns only the shard.

    Args:
      x: this device's summand, as large as the sum.
      spec: how to split the sum.
      axes: the mesh axes to sum over.
      keep: axes of the spec that split `x` already and are left alone.
    """
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    for dim, axis in split:
        if axis in axes:
            count = lax.axis_size(axis)
            parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
            x = pairwise_sum(_exchange(jnp.moveaxis(parts, dim, 0), (axis,)))
        else:
            x = slice_shard(x, dim, axis)
    return all_sum(x, [axis for axis in axes if axis not in [name for _, name in split]])


def all_sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sum the devices' arrays `x` over mesh axes in a fixed order; every device gets the sum.

    The array is flattened and padded to a multiple of the devices, for one all-to-all and one all-gather. Together they
    move the bytes of an all-reduce. An array with fewer elements than devices is all-gathered instead.
    """
    axes = tuple(axes)
    count = lax.axis_size(axes) if axes else 1
    if count == 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
        total: jax.Array = lax.psum(x, axes) if axes else x
        return total
    if x.size < count:
        return pairwise_sum(lax.all_gather(x, axes))
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
    mine = pairwise_sum(_exchange(flat.reshape(count, -1), axes))
    whole: jax.Array = lax.all_gather(mine, axes)
    return whole.reshape(-1)[: x.size].reshape(x.shape)


def stack_totals(
    fn: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: Mesh
) -> jax.Array:
    """Compute the sum `fn(x)` of each global array, adding over devices in a fixed order; return f32[len(arrays)].

    Each device sends one number per array in a single all-gather. Call it on global arrays, under `jax.jit`.

    Args:
      fn: a sum over the elements of an array, such as the sum of squares.
      arrays: the global arrays.
      specs: how each array is split.
      mesh: the mesh.
    """
    axes = tuple(axis for axis in mesh.axis_names if any(axis in axes_of(spec) for spec in specs))
    sizes = tuple(mesh.shape[axis] for axis in axes)

    def on_device(*shards: jax.Array) -> jax.Array:
        mine = jnp.stack([fn(x).astype(jnp.float32) for x in shards])
        everyone = lax.all_gather(mine, axes).reshape(*sizes, len(arrays)) if axes else mine
        return jnp.stack([_sum_shards(everyone[..., i], axes, axes_of(spec)) for i, spec in enumerate(specs)])

    # Manual over all axes, so that the compiler does not split a sum over axes where the array is replicated.
    spread = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(), check_vma=False)
    totals: jax.Array = spread(*arrays)
    return totals


def _sum_shards(numbers: jax.Array, axes: tuple[str, ...], split: tuple[str, ...]) -> jax.Array:
    """Sum one number per device; of devices that are replicas of each other only the first counts.

    Args:
      numbers: the devices' numbers, with a dimension for each of `axes`.
      axes: the mesh axes.
      split: the axes that split the array. Devices along all other axes are replicas.
    """
    return pairwise_sum(numbers[tuple(slice(None) if axis in split else 0 for axis in axes)].reshape(-1))


ORDERED = Sums(scatter_sum, all_sum, stack_totals, in_order=True)
"""Adds in a fixed order, for `js.explicit(reduction="ordered")`."""


def _exchange(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Send row i of `parts` [devices, ...] to device i; return the rows that this device receives, [devices, ...]."""
    got: jax.Array = lax.all_to_all(parts, axes, split_axis=0, concat_axis=0)
    return got
