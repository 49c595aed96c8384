"""Encode arrays in the formats of `js.wire`, and decode them; convert floats to their bits, and back.

A format encodes arrays of one dimension. Here it is applied along the last dimension, and all other dimensions stay in
front of the dimensions that the format makes:

    x  f32[8, 1000]  --encode, int8 in blocks of 256-->  int8[8, 1000], f32[8, 4]  --decode-->  f32[8, 1000]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxshard.core.compat import function_primitive
from jaxshard.core.wire import Format


class Sent(NamedTuple):
    """The shapes and dtypes to which a format encodes f32[size].

    Attributes:
      arrays: the shape and dtype of each array that `Format.encode` returns.
      tree: the pytree structure of the result of `Format.encode`.
    """

    arrays: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any


@cache
def sent_of(wire: Format, size: int) -> Sent:
    """Return the shapes and dtypes to which a format encodes f32[size], by tracing it.

    Raises:
      ValueError: `encode` returns no array, `decode` does not return f32[size] (the message names both results), or a
        NaN or infinite number arrives as a finite one.
    """
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    sent = jax.eval_shape(wire.encode, x)
    arrays, tree = jax.tree.flatten(sent)
    decoded = jax.eval_shape(lambda sent: wire.decode(sent, size), sent)
    if not arrays or (getattr(decoded, "shape", None), getattr(decoded, "dtype", None)) != (x.shape, x.dtype):
        made, back = (
            ", ".join(f"{one.dtype}{list(one.shape)}" for one in jax.tree.leaves(tree)) or "no arrays"
            for tree in (sent, decoded)
        )
        raise ValueError(
            f"js.wire: {wire.name} loses the shape or dtype: encode makes {made} of float32[{size}], and decode makes "
            f"{back} of these; decode(sent, size) must return float32[size], without the padding of encode"
        )
    _check_non_finite(wire)
    return Sent(tuple(arrays), tree)


@cache
def _check_non_finite(wire: Format) -> None:
    """Raise ValueError if a format makes NaN or infinite numbers finite, because they tell a step of bad gradients."""

    def decoded(x: jax.Array) -> jax.Array:
        return wire.decode(wire.encode(x), x.size)

    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    rows = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
    rows[:, 3] = bad
    with jax.ensure_compile_time_eval():
        hidden = np.isfinite(jax.jit(jax.vmap(decoded))(rows)).all(axis=1)
    if hidden.any():
        raise ValueError(
            f"js.wire: {wire.name} decodes {', '.join(map(str, bad[hidden]))} as finite numbers, so a step could not "
            "see a bad gradient; send a scale that is NaN where the largest number is not finite"
        )


def carrier(dtype: Any) -> Any:
    """Return the dtype in which a collective sends an array: integers for floats of fewer than 32 bits, else `dtype`.

    bf16 is sent as uint16 with the same bits, since some compilers cast small floats to larger ones in collectives.
    """
    dtype = jnp.dtype(dtype)
    is_small_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_small_float else dtype


def shrinks(wire: Format, size: int, dtype: Any) -> bool:
    """Return True if an array of `size` elements has fewer bytes in the format than in `dtype`.

    If not, the array is sent without the format.
    """
    if size == 0:
        return False
    encoded: int = sum(one.size * one.dtype.itemsize for one in sent_of(wire, size).arrays)
    return encoded < size * int(jnp.dtype(dtype).itemsize)


def encode(x: jax.Array, wire: Format) -> list[jax.Array]:
    """Encode an array [..., size] along its last dimension and return the arrays to send, such as values and scales.

    Each result has the same leading dimensions, followed by the shape that the format gives it.
    """
    sent: list[jax.Array] = _ENCODE.bind(x.astype(jnp.float32), wire=wire)
    return sent


def decode(sent: Sequence[jax.Array], wire: Format, size: int) -> jax.Array:
    """Decode the arrays that `encode` returned, such as values and scales, to f32[..., size]."""
    decoded: list[jax.Array] = _DECODE.bind(*sent, wire=wire, size=size)
    return decoded[0]


def to_bits(x: jax.Array) -> jax.Array:
    """Return the bits of a floating array as unsigned integers: bf16 becomes uint16.

    No compiler casts integers to f32 in a collective, as some do with bf16.
    """
    bits: list[jax.Array] = _BITS.bind(x)
    return bits[0]


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Return the floating array of type `dtype` that has these bits, the inverse of `to_bits`."""
    made: list[jax.Array] = _FROM_BITS.bind(bits, dtype=jnp.dtype(dtype))
    return made[0]


def _encode(x: jax.Array, wire: Format) -> list[jax.Array]:
    def of_row(row: jax.Array) -> list[jax.Array]:
        return [_bitcast(one, carrier(one.dtype)) for one in jax.tree.leaves(wire.encode(row))]

    return _over_leading(of_row, x.ndim - 1)(x)


def _decode(*sent: jax.Array, wire: Format, size: int) -> list[jax.Array]:
    form = sent_of(wire, size)

    def of_row(*row: jax.Array) -> list[jax.Array]:
        arrays = [_bitcast(one, expected.dtype) for one, expected in zip(row, form.arrays, strict=True)]
        return [wire.decode(form.tree.unflatten(arrays), size)]

    return _over_leading(of_row, sent[0].ndim - len(form.arrays[0].shape))(*sent)


def _over_leading(fn: Callable[..., list[jax.Array]], dims: int) -> Callable[..., list[jax.Array]]:
    for _ in range(dims):
        fn = jax.vmap(fn)
    return fn


def _bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


_ENCODE = function_primitive("wire_encode", _encode)
_DECODE = function_primitive("wire_decode", _decode)
_BITS = function_primitive("wire_bits", lambda x: [_bitcast(x, f"uint{8 * x.dtype.itemsize}")])
_FROM_BITS = function_primitive("wire_from_bits", lambda bits, dtype: [_bitcast(bits, dtype)])
STEPS = tuple(one.name for one in (_ENCODE, _DECODE, _BITS, _FROM_BITS))
"""The primitives between a stored array and a gathered weight, by which a `jax.checkpoint` policy recognises them: they
are computed again in the backward pass, and their results never saved."""
