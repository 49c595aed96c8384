"""Positions under `js.context`: the positions that each device has, and its part of an array.

A row is cut into 2n chunks for n devices, and device i has the chunks i and 2n - 1 - i, in this order. A causal query
attends to the keys before it, so that one early and one late chunk together are the same work on every device:

    n = 2, a row of 8 positions     chunks       0 1 | 2 3 | 4 5 | 6 7
                                    device 0     0 1               6 7
                                    device 1           2 3   4 5
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxshard.core.cache import cache_in_force
from jaxshard.core.constrain import activations_in_force
from jaxshard.core.marks import is_marking, leave_mark, marked_length


def positions(count: int) -> Int[Array, " count"]:
    """Return the indices in the sequence of the `count` positions that the model computes here, int32[count].

    Use it in a model that does not read positions from its batch, for rotary angles or a table of learned positions.
    Under `js.explicit` and `js.pipelined` with `js.context` these are this device's positions. In `js.generate` they
    continue after the positions in the KV cache. Elsewhere they are 0 to `count` - 1. No collectives.

    Args:
      count: the number of positions of the model's arrays here.

    Raises:
      ValueError: a negative count, or an odd count where a device has two chunks of the sequence.

    Example:
        angles = js.positions(x.shape[1])[:, None] * rates      # x: [rows, positions, width]
    """
    if count < 0:
        raise ValueError(f"positions: the count must not be negative, got {count}")
    if is_marking():
        return leave_mark("js.positions", (), (), [jax.ShapeDtypeStruct((count,), jnp.int32)], (-1,))[0]
    if (cache := cache_in_force()) is not None:
        return cache.positions(count)
    axes = split_axes()
    if not axes:
        return jnp.arange(count, dtype=jnp.int32)
    if count % 2:
        raise ValueError(
            f"positions: a device has two chunks of a row over the axes {list(axes)} of js.context, an even number of "
            f"positions, but was asked for {count}"
        )
    chunk = jnp.arange(count // 2, dtype=jnp.int32)
    first, second = (number * (count // 2) for number in chunks_of(axes))
    return jnp.concatenate([first + chunk, second + chunk])


def count_in_row(count: int) -> int:
    """Return the number of positions of the full sequence; `count` is the number that this device has."""
    if is_marking():
        return marked_length()
    axes = split_axes()
    return count * lax.axis_size(axes) if axes else count


def sum_in_row(x: jax.Array) -> jax.Array:
    """Return the sum over all positions of the full sequence, from the sum over this device's positions.

    Needed only for expressions that are not linear in such sums, such as a product of two sums, because `js.Mean`
    itself adds the devices' plain sums.

    Collectives: an all-reduce of `x` over the axes of `js.context`, if each device has its own positions.
    """
    if is_marking():
        return leave_mark("sum_in_row", (x,), ("sum",), [jax.ShapeDtypeStruct(x.shape, x.dtype)], (None,))[0]
    axes = split_axes()
    return lax.psum(x, axes) if axes else x


def split_axes() -> tuple[str, ...]:
    """Return the mesh axes over which `js.context` has split the positions that the traced code sees; () if none."""
    activations = activations_in_force()
    context = None if activations is None else activations.layout.context
    if activations is None or context is None:
        return ()
    mesh, manual = activations.mesh()
    return context.axis if set(context.axis) <= manual and any(mesh.shape[axis] > 1 for axis in context.axis) else ()


def has_part() -> bool:
    """Return True if the traced code sees only this device's positions, not the full sequence.

    Also True while a proof traces a loss as if its positions were split.
    """
    return is_marking() or bool(split_axes())


def take_part(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Take this device's positions from an array that has all positions in dimension `dim`, inside a `shard_map`.

    Device i of n takes the chunks i and 2n - 1 - i of 2n equal chunks.
    """
    size = x.shape[dim] // (2 * lax.axis_size(axes))
    halves = [lax.dynamic_slice_in_dim(x, number * size, size, dim) for number in chunks_of(axes)]
    return jnp.concatenate(halves, dim)


def chunks_of(axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the indices of this device's two chunks of the sequence: i and 2n - 1 - i, for device i of n."""
    index = lax.axis_index(axes)
    return index, 2 * lax.axis_size(axes) - 1 - index
