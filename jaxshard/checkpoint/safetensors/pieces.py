"""Copy sharded arrays to the host in pieces of some megabytes, in the order of the bytes of the full array.

Example: f32[4, 6] in model order, split over two devices along its second dimension, in pieces of at most 8 bytes. Each
piece is computed from a window of one row and two columns. The three columns of a device need two windows, of which the
second overlaps the first, so its first element is skipped:

    device      0      |      1
    row 0    0  1  2   |   3  4  5      windows at columns 0, 1 (skip 1), 3, 4 (skip 1): elements 0 1, 2, 3 4, 5

So all windows of an array have the same shape, and a single compiled program fetches all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.collectives import all_sum, gather
from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import axes_of, splits_per_dim

LIMIT = 1 << 24
"""The default for the largest number of bytes of a piece."""


class Window(NamedTuple):
    """The shape of a part of an array that is contiguous in the array's bytes: (1, ..., 1, n, *all later sizes).

    The first `cut - 1` sizes are 1. The next dimension has n consecutive indices, all within one shard. The remaining
    dimensions are complete.
    """

    cut: int
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A contiguous part of an array, bitcast to unsigned integers and replicated on every device.

    The first `skip` bytes belong to the previous piece too.
    """

    array: jax.Array
    skip: int


def largest_window(shape: tuple[int, ...], splits: tuple[int, ...], itemsize: int, limit: int) -> Window:
    """Return the largest window (contiguous part of an array) of at most `limit` bytes, but at least one element.

    Args:
      shape: the global shape of the array, in which no size is 0.
      splits: the number of shards along each dimension.
      itemsize: the bytes of one element.
      limit: the largest number of bytes of a window.
    """
    if not shape:
        return Window(0, ())
    cut = next((dim for dim in range(1, len(shape)) if math.prod(shape[dim:]) * itemsize <= limit), len(shape))
    rest = math.prod(shape[cut:]) * itemsize
    count = max(1, min(shape[cut - 1] // splits[cut - 1], limit // rest))
    return Window(cut, (*(1,) * (cut - 1), count, *shape[cut:]))


def window_starts(
    shape: tuple[int, ...], splits: tuple[int, ...], window: Window
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (index of the first element, elements to skip) of windows that together cover the array, in byte order.

    All windows have the same shape. If the last window in a shard would reach beyond the shard, it begins earlier, and
    its first elements, which belong to the previous window, are skipped.
    """
    if not window.cut:
        yield (), 0
        return
    dim, rest = window.cut - 1, (0,) * (len(shape) - window.cut)
    count, local, row = window.shape[dim], shape[dim] // splits[dim], math.prod(shape[window.cut :])
    for outer in product(*map(range, shape[:dim])):
        for shard in range(0, shape[dim], local):
            for at in range(0, local, count):
                first = min(at, local - count)
                yield (*outer, shard + first, *rest), (at - first) * row


def stream_pieces(x: jax.Array, mesh: Mesh, spec: PartitionSpec, limit: int = LIMIT) -> Iterator[Piece]:
    """Yield an array piece by piece, in the order of its bytes.

    Collective: every process must take all pieces. Each piece takes an all-reduce over the mesh axes that split the
    first `Window.cut` dimensions, in which devices without the piece add zeros, and an all-gather over the mesh axes
    that split the later dimensions. A device needs memory for one piece in addition to its shard.

    Args:
      x: the global array, in model order.
      mesh: the mesh of the array.
      spec: the sharding of the array.
      limit: the largest number of bytes of a piece.
    """
    if x.size == 0:
        return
    splits = splits_per_dim(mesh, spec)
    window = largest_window(x.shape, splits, x.dtype.itemsize, limit)
    program = _jit_fetch(mesh, spec, window)
    for start, skip in window_starts(x.shape, splits, window):
        # Simulated CPU devices can deadlock with more than one program in flight.
        yield Piece(jax.block_until_ready(program(x, np.array(start, np.int32))), skip * x.dtype.itemsize)


def fetch_bytes(piece: Piece) -> bytes:
    """Copy a piece to the host as bytes, without the first `skip` bytes, which belong to the previous piece."""
    return np.asarray(piece.array.addressable_data(0)).reshape(-1).view(np.uint8)[piece.skip :].tobytes()


@lru_cache(maxsize=512)
def _jit_fetch(mesh: Mesh, spec: PartitionSpec, window: Window) -> Any:
    cut, whole = PartitionSpec(*spec[: window.cut]), PartitionSpec(*(None,) * window.cut, *spec[window.cut :])

    def local(x: jax.Array, start: jax.Array) -> jax.Array:
        at, mine = [], jnp.ones((), bool)  # `mine`: the window is in this device's shard
        for dim in range(x.ndim):
            first = start[dim] - _index(axis_names(spec[dim])) * x.shape[dim] if dim < window.cut else jnp.int32(0)
            mine &= (first >= 0) & (first < x.shape[dim])
            at.append(first)
        sizes = (*window.shape[: window.cut], *x.shape[window.cut :])
        # Cast floats to integers before slicing: a compiler may change the bits of NaN when it moves floats, as XLA
        # does with float8_e5m2 on a CPU (JAX 0.12). Cast everything to integers before adding zeros.
        x = _to_bits(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        bits = _to_bits(lax.dynamic_slice(x, at, sizes))
        alone = all_sum(jnp.where(mine, bits, jnp.zeros((), bits.dtype)), axes_of(cut))
        return gather(alone, whole)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    )


def _index(axes: tuple[str, ...]) -> Any:
    return lax.axis_index(axes) if axes else 0


def _to_bits(x: jax.Array) -> jax.Array:
    """Bitcast an array to unsigned integers; complex numbers get a last dimension of two, booleans become bytes.

    An all-reduce then adds zeros without changing a bit. With floats, -0.0 would become 0.0.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
