"""Random keys that do not depend on how the rows of a batch are spread over devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

# How far apart the rows at hand lie in the global batch: micro-batches may take every n-th row.
_stride = jax.make_user_context(default_value=1)


def row_stride(rows: int) -> AbstractContextManager[None]:
    """A context in which the rows at hand lie `rows` apart in the global batch."""
    context: AbstractContextManager[None] = _stride(rows)
    return context


def row_keys(key: jax.Array, rows: int) -> jax.Array:
    """One random key per row: keys[rows], the same for a row of the global batch wherever that row is computed.

    Call it on the key that your function received, before any split, and vmap over the result: under every engine and
    mesh row r of the global batch then draws the same numbers. No collectives.

    A key is a counter: the engine hands a device that holds the rows from r on the step's key advanced by r
    (`advance`), and key i here is the received key advanced by i and hashed once, so both sums agree.
    """
    if rows < 0:
        raise ValueError(f"row_keys: the number of rows must not be negative, got {rows}")
    numbers = _stride.value * jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(lambda row: jax.random.fold_in(advance(key, row), 0))(numbers)


def advance(key: jax.Array, rows: jax.Array | int) -> jax.Array:
    """The key of the row that lies `rows` further on: the last word of the key plus rows, modulo 2**32."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if typed else key
    data = data.at[..., -1].add(jnp.asarray(rows).astype(data.dtype))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)) if typed else data


def typed_key(key: Any) -> jax.Array:
    """A new-style key from a seed, an old uint32 key or a new-style key."""
    if isinstance(key, Integral):
        return jax.random.key(int(key))
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if dtype != jnp.uint32:
        got = type(key).__name__ if dtype is None else f"{dtype}{list(key.shape)}"
        raise TypeError(f"key must be a seed or a jax.random key, got {got}")
    return jax.random.wrap_key_data(key)


def key_impl_of(dtype: Any) -> Any:
    """Return the implementation behind a dtype of random keys, as `jax.random.wrap_key_data` takes it.

    `jax.random.key_impl` takes keys but no dtypes, so it is asked inside of a trace.
    """
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
