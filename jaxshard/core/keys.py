"""Random keys per row that do not depend on how the rows of a batch are split over devices.

A key is used as a counter. If a device's rows begin at row r of the global batch, the engine gives it the step's key
advanced by r. Key i of `row_keys` there is that key advanced by i, so both together give the step's key advanced by
r + i, on every mesh.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, UInt32

ArrayOrShape = TypeVar("ArrayOrShape", jax.Array, jax.ShapeDtypeStruct)

# The distance in the global batch between neighbouring rows of a micro-batch, which may take every n-th row.
_stride = jax.make_user_context(default_value=1)


def row_stride(rows: int) -> AbstractContextManager[None]:
    """Return a context for `row_keys` in which neighbouring rows of a micro-batch are `rows` apart in the global batch.

    With a stride of 2, the first of two micro-batches has the rows 0, 2, 4, ... and the second the rows 1, 3, 5, ...
    """
    context: AbstractContextManager[None] = _stride(rows)
    return context


def row_keys(
    key: Key[Array, ""] | UInt32[Array, " words"], rows: int
) -> Key[Array, " rows"] | UInt32[Array, "rows words"]:
    """Make one random key per row, the same for a row of the global batch wherever that row is computed.

    Call it on the key that your function received, before any split, and `vmap` over the result. Row r of the global
    batch then draws the same random numbers under every engine and mesh. No collectives.

    Args:
      key: the key that `loss_fn` (or a block of `js.Stacked`) received.
      rows: how many rows the loss received: the global batch under `js.auto`, this device's rows under other engines.

    Returns:
      Keys [rows], of the kind of `key`.

    Raises:
      ValueError: a negative number of rows.

    Example:
        keys = js.row_keys(key, len(x))                                      # x: f32[rows, features]
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, x.shape[1:]))(keys)
    """
    if rows < 0:
        raise ValueError(f"row_keys: the number of rows must not be negative, got {rows}")
    return keys_of_rows(key, _stride.value * jnp.arange(rows, dtype=jnp.uint32))


def keys_of_rows(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Make one random key per row, from the rows' indices in the global batch, uint32[rows].

    `row_keys` gives each row the same key.
    """
    # The hash makes row r's key differ from the advanced key, from which the user may draw numbers too.
    keys: jax.Array = jax.vmap(lambda row: jax.random.fold_in(advance(key, row), 0))(numbers)
    return keys


def advance(key: jax.Array, rows: jax.Array | int) -> jax.Array:
    """Advance a key by a number of rows: add the number to the last uint32 word of the key, modulo 2**32."""
    data = words_of(key)
    return keys_of(data.at[..., -1].add(jnp.asarray(rows).astype(data.dtype)), key.dtype)


def neighbour(key: jax.Array) -> jax.Array:
    """Return a second key that is independent of `key` and of every key that is split or folded from `key`.

    It commutes with `advance`: `neighbour(advance(key, r))` equals `advance(neighbour(key), r)`.
    """
    data = words_of(key)
    # Not by fold_in: engines add rows to the last word before this call, and `row_keys` adds to it afterwards.
    return keys_of(data.at[..., 0].add(jnp.asarray(0x9E3779B9, data.dtype)), key.dtype)


def typed_key(key: Any) -> jax.Array:
    """Convert a seed, an old uint32 key or a new-style key to a new-style key; raise TypeError for anything else."""
    if isinstance(key, Integral):
        return jax.random.key(int(key))
    dtype = getattr(key, "dtype", None)
    if dtype is not None and is_key(dtype):
        typed: jax.Array = key
        return typed
    if dtype != jnp.uint32:
        got = type(key).__name__ if dtype is None else f"{dtype}{list(key.shape)}"
        raise TypeError(f"key must be a seed or a jax.random key, got {got}")
    wrapped: jax.Array = jax.random.wrap_key_data(key)
    return wrapped


def is_key(dtype: Any) -> bool:
    """Return True for the dtype of typed random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words_of(x: ArrayOrShape) -> ArrayOrShape:
    """Return the uint32 words of random keys; return any other array unchanged.

    Args:
      x: an array, or a `ShapeDtypeStruct`, for which a `ShapeDtypeStruct` is returned.
    """
    if not is_key(x.dtype):
        return x
    key_data: Any = jax.random.key_data
    words: ArrayOrShape = jax.eval_shape(key_data, x) if isinstance(x, jax.ShapeDtypeStruct) else key_data(x)
    return words


def keys_of(x: jax.Array, dtype: Any) -> jax.Array:
    """Make random keys from their words, the inverse of `words_of`; return other arrays, and keys, unchanged.

    Args:
      x: the result of `words_of`.
      dtype: the dtype of the array before `words_of`.
    """
    was_key = is_key(dtype) and x.dtype != dtype
    keys: jax.Array = jax.random.wrap_key_data(x, impl=key_impl_of(dtype)) if was_key else x
    return keys


def key_impl_of(dtype: Any) -> Any:
    """Return the implementation of a dtype of random keys, as `jax.random.wrap_key_data` takes it.

    `jax.random.key_impl` takes keys but no dtypes, so a key is traced and not made.
    """
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
