"""Read arrays of a saved step onto devices, by TensorStore: from files, or from an object store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.checkpoint.store import STATE, array_spec
from jaxshard.storage.paths import AnyPath

_AT_ONCE = 1 << 30
"""About as many bytes of arrays are on the host at once, apart from a larger array, which is read alone."""

Index = tuple[slice, ...]


def load_arrays(folder: AnyPath, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read arrays. Every process calls this; processes don't wait for each other.

    A process reads only the chunks that contain shards of its devices. A part that several of its devices hold is read
    once. Arrays without elements are not read, but made here.

    Args:
      folder: the folder with the arrays.
      arrays: {name: global shape, dtype and sharding} of every array to read.

    Returns:
      {name: array}, with these shardings.

    Raises:
      ValueError, OSError: an array can't be read, or a chunk of an object store's step has another checksum.
    """
    import tensorstore

    context = tensorstore.Context()  # one, so that the index is read once
    loaded = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in arrays.items() if not x.size}
    for group in _divide({name: x for name, x in arrays.items() if x.size}):
        opened = {
            name: tensorstore.open(array_spec(folder / STATE, name), open=True, read=True, context=context)
            for name in group
        }
        parts = {name: _start_reading(source.result(), group[name]) for name, source in opened.items()}
        loaded |= {name: _assemble(x, parts.pop(name)) for name, x in group.items()}
    return loaded


def _divide(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Divide arrays into groups whose parts on this process have about a gigabyte each."""
    group, size = dict[str, jax.ShapeDtypeStruct](), 0
    for name, x in arrays.items():
        shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        mine = shard * len(_devices_of_parts(x))
        if group and size + mine > _AT_ONCE:
            yield group
            group, size = {}, 0
        group[name], size = x, size + mine
    if group:
        yield group


def _devices_of_parts(x: jax.ShapeDtypeStruct) -> dict[tuple[tuple[int, int], ...], list[tuple[jax.Device, Index]]]:
    """Return {bounds of a part: (device, slices) of each device of this process that holds it}."""
    parts: dict[tuple[tuple[int, int], ...], list[tuple[jax.Device, Index]]] = {}
    for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
        bounds = tuple(where.indices(size)[:2] for where, size in zip(index, x.shape, strict=True))
        parts.setdefault(bounds, []).append((device, index))
    return parts


def _start_reading(source: Any, x: jax.ShapeDtypeStruct) -> list[tuple[Any, list[jax.Device]]]:
    """Start to read the parts of an array; return (what will be the part, devices that hold it) of each."""
    if (source.shape, source.dtype.numpy_dtype) != (x.shape, x.dtype):
        raise ValueError(f"an array is {source.dtype.name}{list(source.shape)}, not {x.dtype}{list(x.shape)}")
    held = _devices_of_parts(x).values()
    return [(source[part[0][1]].read(), [device for device, _ in part]) for part in held]


def _assemble(x: jax.ShapeDtypeStruct, parts: list[tuple[Any, list[jax.Device]]]) -> jax.Array:
    shards = [jax.device_put(part.result(), device) for part, devices in parts for device in devices]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards, dtype=x.dtype)
