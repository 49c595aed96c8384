"""Gathers with a checksum: what arrives must have the bits that were sent, or it becomes NaN and the step a bad one.

Each device adds up the bits of its shard at their places in the whole array, one all-reduce of a number of 32 bits adds
these over the devices, and each compares the total with the sum of the array that it received (`core/bit_sums.py`):

    shards on 4 devices     sums s0 s1 s2 s3     all-reduced: s0 + s1 + s2 + s3
    gathered on device 2    its own sum  t       t == s0 + s1 + s2 + s3, else all elements become NaN there

A NaN in a weight makes the loss NaN, on all devices once it is summed, and a step whose loss is not finite changes
nothing. So a gather that went wrong costs a step instead of spoiling the run; `js.fit(bad_steps=...)` says what then
happens. It is not named which gather it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.bit_sums import bit_sum, bit_sum_of_shard
from jaxshard.core.collectives import gather
from jaxshard.core.placement import split_dims


def checked_gather(x: jax.Array, spec: PartitionSpec, *, keep: Sequence[str] = ()) -> jax.Array:
    """Do what `collectives.gather` does; of a floating array whose bits arrive changed all elements become NaN.

    Costs one all-reduce of 4 bytes for each array, and one pass over the shard and one over the result.
    """
    whole = gather(x, spec, keep=keep)
    split = [(dim, axis) for dim, axis in split_dims(spec) if axis not in keep]
    if not split or not jnp.issubdtype(x.dtype, jnp.floating):
        return whole
    starts: list[jax.Array | int] = [0] * x.ndim
    for dim, axis in split:  # the major axes of a dimension first
        starts[dim] = starts[dim] * lax.axis_size(axis) + lax.axis_index(axis)
    starts = [start * size for start, size in zip(starts, x.shape, strict=True)]
    sent = lax.psum(bit_sum_of_shard(x, whole.shape, starts), tuple(axis for _, axis in split))
    return jnp.where(sent == bit_sum(whole), whole, jnp.nan)
