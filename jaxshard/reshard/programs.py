"""The compiled programs that move one array: cut pieces on the source mesh, send them, insert them on the target mesh.

    cut      on the mesh of the source     a slice of each device's shard; no collective
    send     on the devices of both        a collective-permute for every round in which pieces leave their device
    insert   on the mesh of the target     each piece into the device's new shard, in place; no collective

Three programs, and not one over all devices, because a device of one mesh alone then needs no array of the other's
shape. Only devices that are in a mesh run its programs, so a process without such devices skips them.

Floats travel as unsigned integers of their size: on a CPU, XLA casts bf16 to f32 before it communicates, which sends
twice the bytes and changes the bits of signalling NaNs. It does the same where a piece is inserted (up to JAX 0.10), so
there the new array is made as integers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type, dynamic_slice, dynamic_update_slice, ppermute
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxshard.reshard.blocks import Index, Side
from jaxshard.reshard.schedule import Round, union_devices

Pairs = tuple[tuple[int, int], ...]
Rows = dict[jax.Device, jax.Array]
"""The pieces [1, *shape] of this process's devices."""
_AXIS = "device"


def move(x: Any, dtype: Any, source: Side, target: Side, batches: Sequence[Sequence[Round]]) -> jax.Array:
    """Move an array to its target sharding, by batches of rounds; wait for the end of each.

    Every process that has devices of either side calls this.

    Args:
      x: the stored array, with the sharding of `source`; it is not read in a process without devices of the source. It
        is not donated, and shares no buffer with the result.
      dtype: its dtype.
      source: how the array is stored.
      target: how the result is stored.
      batches: from `schedule`.

    Returns:
      The stored array with the sharding of `target`; padding is zero.
    """
    moved = _zeros(target, dtype_of_new(dtype, target.mesh))
    for batch in batches:
        moved = _move_batch(x, dtype, moved, source, target, batch)
    return moved if moved.dtype == dtype or not is_here(target.mesh) else _caster(dtype)(moved)


def _move_batch(x: Any, dtype: Any, moved: jax.Array, source: Side, target: Side, batch: Sequence[Round]) -> jax.Array:
    """Move the pieces of a batch from `x` into `moved`, which is donated, and wait for the end."""
    pieces: list[Rows] = [{} for _ in batch]
    if is_here(source.mesh):
        pieces = [_rows_of(cutter(source.mesh, source.spec, one.shape)(x, one.source_at)) for one in batch]
    away, mesh = [number for number, one in enumerate(batch) if one.pairs], union_mesh(source.mesh, target.mesh)
    if away and is_here(mesh):
        send = sender(mesh, tuple(batch[number].pairs for number in away))
        sent = send(*(_join(pieces[number], mesh, batch[number].shape, dtype) for number in away))
        for number, piece in zip(away, sent, strict=True):
            pieces[number] = _rows_of(piece)
    if is_here(target.mesh):
        for one, rows in zip(batch, pieces, strict=True):
            insert = inserter(target.mesh, target.spec, one.shape)
            moved = insert(moved, one.target_at, one.receives, _join(rows, target.mesh, one.shape, dtype))
    # Wait, or the pieces of all batches would be in memory; simulated devices run one program at a time.
    jax.block_until_ready((moved, [list(rows.values()) for rows in pieces]))
    return moved


@lru_cache(maxsize=1024)
def cutter(mesh: Mesh, spec: PartitionSpec, shape: Index) -> Any:
    """Return the jitted function `cut(x, at)`, which takes a piece of a shape from each shard.

    Its arguments are the stored array and int32[devices, stored dimensions], the index of the piece in each shard. It
    returns [devices, *shape], one row on each device, floats as unsigned integers.
    """

    def cut(x: jax.Array, at: jax.Array) -> jax.Array:
        start = tuple(at[jax.lax.axis_index(mesh.axis_names)])
        return dynamic_slice(_to_bits(x), start, _stored(shape, x)).reshape(1, *shape)  # the compiler fuses the cast

    specs = (spec, PartitionSpec())
    return jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=specs, out_specs=_split(mesh), check_vma=False))


@lru_cache(maxsize=1024)
def sender(mesh: Mesh, pairs: tuple[Pairs, ...]) -> Any:
    """Return the jitted function `send(*pieces)`: a collective-permute of each argument by its pairs of devices.

    Its arguments and results are [devices, *shape], one row on each device.
    """

    def send(*pieces: jax.Array) -> list[jax.Array]:
        return [ppermute(piece, _AXIS, one) for piece, one in zip(pieces, pairs, strict=True)]

    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=_split(mesh), out_specs=_split(mesh), check_vma=False))


@lru_cache(maxsize=1024)
def inserter(mesh: Mesh, spec: PartitionSpec, shape: Index) -> Any:
    """Return the jitted function `insert(x, at, receives, pieces)`, which writes a piece into each shard of `x`.

    The stored array `x` is donated. `at` is int32[devices, stored dimensions], `receives` is bool[devices], False for a
    device whose shard stays as it is, and `pieces` is [devices, *shape], one row on each device.
    """

    def insert(x: jax.Array, at: jax.Array, receives: jax.Array, pieces: jax.Array) -> jax.Array:
        here = jax.lax.axis_index(mesh.axis_names)
        start, size = tuple(at[here]), _stored(shape, x)
        before = _to_bits(dynamic_slice(x, start, size))
        after = jnp.where(receives[here], pieces.reshape(size), before)
        return dynamic_update_slice(x, _from_bits(after, x.dtype), start)

    specs = (spec, PartitionSpec(), PartitionSpec(), _split(mesh))
    mapped = jax.shard_map(insert, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


@lru_cache(maxsize=1024)
def _maker(sharding: NamedSharding, shape: Index, dtype: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@lru_cache(maxsize=64)
def _caster(dtype: Any) -> Any:
    return jax.jit(partial(_from_bits, dtype=dtype))


def _zeros(side: Side, dtype: Any) -> jax.Array:
    """Make a stored array of zeros; without any shards in a process that has none of its devices."""
    if is_here(side.mesh):
        made: jax.Array = _maker(side.sharding, side.view.stored, dtype)()
        return made
    return jax.make_array_from_single_device_arrays(side.view.stored, side.sharding, [], dtype=dtype)


def _rows_of(pieces: jax.Array) -> Rows:
    return {shard.device: shard.data for shard in pieces.addressable_shards}


def _join(rows: Rows, mesh: Mesh, shape: Index, dtype: Any) -> jax.Array:
    """Make an array [devices, *shape] of the rows of this process's devices, without a copy; zeros for missing rows."""
    bits = _bits(dtype)
    own = [
        rows[device] if device in rows else jax.device_put(np.zeros((1, *shape), bits), device)
        for device in mesh.local_devices
    ]
    sharding = NamedSharding(mesh, _split(mesh))
    return jax.make_array_from_single_device_arrays((mesh.size, *shape), sharding, own, dtype=bits)


def _split(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)


def _stored(shape: Index, x: jax.Array) -> Index:
    """Return the shape of a piece inside a stored shard, which may have more dimensions in front."""
    return (*(1,) * (x.ndim - len(shape)), *shape)


def dtype_of_new(dtype: Any, mesh: Mesh) -> Any:
    """Return the dtype to make the new array with: on a CPU, unsigned integers for floats of 8 and 16 bits.

    Such an array is copied once, to its own dtype.
    """
    narrow = mesh.devices.flat[0].platform == "cpu" and jnp.dtype(dtype).itemsize < 4
    return _bits(dtype) if narrow else dtype


def union_mesh(source: Mesh, target: Mesh) -> Mesh:
    """Return a mesh with one axis over the devices of two meshes, each once, in the order of their ids."""
    return Mesh(np.array(union_devices(source, target)), (_AXIS,), axis_types=(AxisType.Auto,))


def is_here(mesh: Mesh) -> bool:
    """Return True if this process has devices of a mesh."""
    return bool(mesh.local_devices)


def _bits(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if floating else dtype


def _to_bits(x: jax.Array) -> jax.Array:
    return bitcast_convert_type(x, _bits(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits
