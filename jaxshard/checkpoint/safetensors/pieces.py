"""Arrays in pieces of some megabytes, in the order of their bytes: all that is ever on a host of an array."""

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
"""Bytes of the largest piece."""


class Window(NamedTuple):
    """A part of an array that is contiguous in its bytes: one index in each of the first `cut` - 1 dimensions, some in
    the next one, which no shard's border crosses, and all in the others."""

    cut: int
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A window's elements as unsigned integers, the same on every device; the first `skip` were in the one before."""

    array: jax.Array
    skip: int


def window_of(shape: tuple[int, ...], splits: tuple[int, ...], itemsize: int, limit: int) -> Window:
    """The largest window of at most `limit` bytes, but at least one element, in an array without empty dimensions."""
    if not shape:
        return Window(0, ())
    cut = next((dim for dim in range(1, len(shape)) if math.prod(shape[dim:]) * itemsize <= limit), len(shape))
    rest = math.prod(shape[cut:]) * itemsize
    count = max(1, min(shape[cut - 1] // splits[cut - 1], limit // rest))
    return Window(cut, (*(1,) * (cut - 1), count, *shape[cut:]))


def starts(shape: tuple[int, ...], splits: tuple[int, ...], window: Window) -> Iterator[tuple[tuple[int, ...], int]]:
    """(where, skip) of windows that together are the array, in the order of its bytes.

    All have one shape, so the last one in a shard begins earlier where it would not fit, and its first elements are to
    be skipped.
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


def pieces(x: jax.Array, mesh: Mesh, spec: PartitionSpec, limit: int = LIMIT) -> Iterator[Piece]:
    """The elements of an array that is split as `spec` says, in the order of its bytes; every process takes part.

    A device contributes its part of a window: those that split a cut dimension are all-reduced (all but one add zeros),
    those that split another one all-gathered. So a device holds one piece besides its shard.
    """
    if x.size == 0:
        return
    splits = splits_per_dim(mesh, spec)
    window = window_of(x.shape, splits, x.dtype.itemsize, limit)
    program = _program(mesh, spec, window)
    for start, skip in starts(x.shape, splits, window):
        # One program at a time: simulated devices starve otherwise.
        yield Piece(jax.block_until_ready(program(x, np.array(start, np.int32))), skip * _words(x.dtype))


def fetch(piece: Piece) -> bytes:
    """The piece's bytes on the host, without those that were in the one before."""
    return np.asarray(piece.array.addressable_data(0)).reshape(-1)[piece.skip :].tobytes()


def _words(dtype: Any) -> int:
    return 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1


@lru_cache(maxsize=512)
def _program(mesh: Mesh, spec: PartitionSpec, window: Window) -> Any:
    cut, whole = PartitionSpec(*spec[: window.cut]), PartitionSpec(*(None,) * window.cut, *spec[window.cut :])

    def local(x: jax.Array, start: jax.Array) -> jax.Array:
        at, mine = [], jnp.ones((), bool)
        for dim in range(x.ndim):
            first = start[dim] - _index(axis_names(spec[dim])) * x.shape[dim] if dim < window.cut else jnp.int32(0)
            mine &= (first >= 0) & (first < x.shape[dim])
            at.append(first)
        sizes = (*window.shape[: window.cut], *x.shape[window.cut :])
        bits = _bits(lax.dynamic_slice(_bits(x) if _is_float(x.dtype) else x, at, sizes))
        alone = all_sum(jnp.where(mine, bits, jnp.zeros((), bits.dtype)), axes_of(cut))
        return gather(alone, whole)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    )


def _index(axes: tuple[str, ...]) -> Any:
    return lax.axis_index(axes) if axes else 0


def _is_float(dtype: Any) -> bool:
    """Whether a compiler may take the bits for a number, and change those of NaN even where it only moves them.

    XLA does so with float8_e5m2 on a CPU (JAX 0.12).
    """
    return jnp.issubdtype(dtype, jnp.floating)


def _bits(x: jax.Array) -> jax.Array:
    """The same bytes as unsigned integers, which keep them when zeros are added: -0.0 would become 0.0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
