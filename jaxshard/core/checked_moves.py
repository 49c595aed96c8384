"""Gathers and exchanges with a checksum: what arrives must have the bits that were sent, or it becomes NaN.

Each device adds up the bits of its shard at their places in the whole array, one all-reduce of a number of 32 bits adds
these over the devices, and each compares the total with the sum of the array that it received (`core/bit_sums.py`):

    shards on 4 devices     sums s0 s1 s2 s3     all-reduced: s0 + s1 + s2 + s3
    gathered on device 2    its own sum  t       t == s0 + s1 + s2 + s3, else all elements become NaN there

Of an exchange, an all-to-all, no device receives the whole. There the total of what all devices sent is compared with
that of what all received, again by one all-reduce: of s - t, the sum of the bits that a device sent minus that of those
that it received. If it is not zero the array becomes NaN on all devices.

A sum of floating numbers has no checksum that is known before it is taken. But in one order (`core/ordered_sums.py`)
shares travel as they are and are added where they arrive, so that these two cover all that moves in such a sum.

A NaN in a weight or a gradient makes the step a bad one on all devices, and a step that is bad changes nothing. So a
transfer that went wrong costs a step instead of spoiling the run; `js.fit(bad_steps=...)` says what then happens. It is
not named which transfer it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.bit_sums import bit_sum, bit_sum_of_shard
from jaxshard.core.collectives import Sums, gather
from jaxshard.core.ordered_sums import PLAIN, Moves, sums_by
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


def _gather_shares(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return checked_gather(x[None], PartitionSpec(axes))


def checked_exchange(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Exchange parts [n, ...] -> [n, ...], device i receives every device's part i; all NaN if other bits arrive.

    Costs one all-reduce of 4 bytes for each array, and two passes over it.
    """
    got = PLAIN.exchange(parts, axes)
    count, me = len(parts), lax.axis_index(axes)
    # Every element has one place in [from which device, to which device, ...], where it is sent and where it arrives.
    everything = (count, count, *parts.shape[1:])
    rest = (0,) * (parts.ndim - 1)
    sent = bit_sum_of_shard(parts[None], everything, (me, 0, *rest))
    arrived = bit_sum_of_shard(got[:, None], everything, (0, me, *rest))
    return jnp.where(lax.psum(sent - arrived, axes) == 0, got, jnp.nan)


CHECKED: Sums = sums_by(Moves(checked_exchange, _gather_shares))
"""Sums in one order of shares that are compared with what was sent, for `js.explicit(reduction="checked")`."""
