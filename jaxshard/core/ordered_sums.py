"""Sums over mesh axes in one order, whatever the processes: the same bits from 1 x 8 devices as from 4 x 2.

A native reduction adds in the order that suits the wires. Here the parts travel as they are, and every device adds
those that it is to know the sum of, in the order of the devices in the mesh. Integers are exact in any order and go
the native way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.collectives import Sums
from jaxshard.core.placement import axes_of, split_dims


def pairwise_sum(parts: jax.Array) -> jax.Array:
    """[n, ...] -> [...], added in pairs: of four parts (0 + 2) + (1 + 3). What is narrower than f32 is added in f32.

    Reference: while n > 1, part i takes part i + n // 2 on, and an odd last one waits.
    """
    dtype = parts.dtype
    parts = parts.astype(jnp.promote_types(dtype, jnp.float32))
    while len(parts) > 1:
        half = len(parts) // 2
        sums = parts[:half] + parts[half : 2 * half]
        parts = jnp.concatenate([sums, parts[2 * half :]]) if len(parts) % 2 else sums
    return parts[0].astype(dtype)


def scatter_sum(x: jax.Array, spec: PartitionSpec, axes: Sequence[str], *, keep: Sequence[str] = ()) -> jax.Array:
    """`_collectives.scatter_sum` in one order.

    An all-to-all for each reduce-scatter: it moves as many bytes, but its result is as large as what goes in, where
    a reduce-scatter leaves the shard alone.
    """
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    for dim, axis in split:
        count = lax.axis_size(axis)
        if axis in axes:
            parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
            x = _exchanged_sum(jnp.moveaxis(parts, dim, 0), (axis,))
        else:
            size = x.shape[dim] // count
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)
    return all_sum(x, tuple(axis for axis in axes if axis not in [name for _, name in split]))


def all_sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """`_collectives.all_sum` in one order.

    An all-to-all and an all-gather of the array, flat and padded so that it divides: as many bytes as an all-reduce. An
    array with fewer elements than there are devices is gathered from all of them instead.
    """
    axes = tuple(axes)
    count = lax.axis_size(axes) if axes else 1
    if count == 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.psum(x, axes) if axes else x
    if x.size < count:
        return pairwise_sum(lax.all_gather(x, axes))
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
    mine = _exchanged_sum(flat.reshape(count, -1), axes)
    return lax.all_gather(mine, axes, tiled=True)[: x.size].reshape(x.shape)


ORDERED = Sums(scatter_sum, all_sum)


def _exchanged_sum(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[n, ...] -> [...]: device i has the sum over the devices of everyone's part i."""
    return pairwise_sum(lax.all_to_all(parts, axes, split_axis=0, concat_axis=0))


def totals(
    fn: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: Mesh
) -> jax.Array:
    """f32[arrays]: `fn`, a sum over elements, of each global array, split over the mesh as its spec says.

    One all-gather of one number per array and device. In global-view code, under jit.
    """
    axes = tuple(axis for axis in mesh.axis_names if any(axis in axes_of(spec) for spec in specs))
    sizes = tuple(mesh.shape[axis] for axis in axes)

    def on_device(*shards: jax.Array) -> jax.Array:
        mine = jnp.stack([fn(x).astype(jnp.float32) for x in shards])
        everyone = lax.all_gather(mine, axes).reshape(*sizes, len(arrays)) if axes else mine
        return jnp.stack([_of_shards(everyone[..., i], axes, axes_of(spec)) for i, spec in enumerate(specs)])

    # Manual over all axes, so that the compiler does not split a sum over those where every device has a copy.
    return jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(), check_vma=False)(
        *arrays
    )


def _of_shards(numbers: jax.Array, axes: tuple[str, ...], split: tuple[str, ...]) -> jax.Array:
    """The sum of one number per device, [size of each axis]; copies over the axes that do not split count once."""
    return pairwise_sum(numbers[tuple(slice(None) if axis in split else 0 for axis in axes)].reshape(-1))
