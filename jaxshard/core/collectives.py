"""Collectives over the named axes of a `PartitionSpec`, inside `shard_map`.

Several axes are taken one after the other, never as one: one mesh axis per torus dimension then gives native
reduce-scatters on TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.placement import split_dims


def gather(x: jax.Array, spec: PartitionSpec, *, keep: Sequence[str] = ()) -> jax.Array:
    """The whole array of which `x` is this device's shard under `spec`; axes in `keep` go on splitting it.

    One all-gather per axis, minor axes first; the result's bytes are moved once for the last of them.
    """
    for dim, axis in reversed(split_dims(spec)):
        if axis not in keep:
            x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_sum(x: jax.Array, spec: PartitionSpec, axes: Sequence[str], *, keep: Sequence[str] = ()) -> jax.Array:
    """This device's shard under `spec` of the sum of `x` over `axes`, of which `x` is one device's share.

    Axes of the spec that are in `axes` are reduce-scattered, major axes first; axes of the spec that are not are
    sliced (every device there holds the same share); axes that the spec lacks are all-reduced last, when the array is
    smallest.
    """
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    for dim, axis in split:
        if axis in axes:
            x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        else:
            size = x.shape[dim] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)
    rest = tuple(axis for axis in axes if axis not in [name for _, name in split])
    return all_sum(x, rest)


def all_sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over the axes, on every device; `x` itself without axes."""
    return lax.psum(x, tuple(axes)) if axes else x


class Sums(NamedTuple):
    """How shares are added over devices: `scatter_sum` and `all_sum` of this file, or those of `_ordered`."""

    scatter_sum: Callable[..., jax.Array]
    all_sum: Callable[[jax.Array, Sequence[str]], jax.Array]


NATIVE = Sums(scatter_sum, all_sum)


def total(x: jax.Array, axes: Sequence[str], sums: Sums = NATIVE) -> jax.Array:
    """The sum of a share of a loss, a weight or a metric over the axes; what is narrower than f32 is added in f32."""
    if x.dtype in _NARROW and axes:
        # Also because the CPU compiler aborts on a manual bf16 sum beside automatic axes (JAX 0.10 to 0.12).
        return sums.all_sum(x.astype(jnp.float32), axes).astype(x.dtype)
    return sums.all_sum(x, axes)


def all_max(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The maximum over the axes, on every device; `x` itself without axes."""
    if not axes:
        return x
    wide = {jnp.dtype(bool): jnp.int32}.get(x.dtype, jnp.float32 if x.dtype in _NARROW else x.dtype)
    return lax.pmax(x.astype(wide), tuple(axes)).astype(x.dtype)


_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
