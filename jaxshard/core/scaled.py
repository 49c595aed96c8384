"""Quantize arrays to 8-bit formats of `js.wire` with scales, and back; convert floats to their bits, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.compat import function_primitive
from jaxshard.core.wire import LARGEST, Scaled


class Encoded(NamedTuple):
    """A quantized array, as devices send it.

    Attributes:
      values: [..., size], in the format's carrier dtype.
      scales: f32[..., blocks].
    """

    values: jax.Array
    scales: jax.Array


def encode(x: jax.Array, wire: Scaled) -> Encoded:
    """Quantize an array [..., size] in blocks along its last dimension.

    A block with an infinite or NaN number has the scale NaN, so that the receiver decodes all of it as NaN.
    """
    x = x.astype(jnp.float32)
    scales = _SCALES.bind(x, wire=wire)
    return Encoded(_VALUES.bind(x, scales, wire=wire), scales)


def decode(sent: Encoded, wire: Scaled) -> jax.Array:
    """Dequantize the result of `encode` to f32[..., size]."""
    decoded: jax.Array = _DECODE.bind(*sent, wire=wire)
    return decoded


def to_bits(x: jax.Array) -> jax.Array:
    """Return the bits of a floating array as unsigned integers, so that no compiler casts it to f32 in a collective."""
    bits: jax.Array = _BITS.bind(x)
    return bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Return the floating array of these bits."""
    x: jax.Array = _FROM_BITS.bind(bits, dtype=jnp.dtype(dtype))
    return x


def _scales(x: jax.Array, wire: Scaled) -> jax.Array:
    largest = jnp.max(jnp.abs(_cut(x, wire)), axis=-1)
    return jnp.where(jnp.isfinite(largest), largest / LARGEST[wire.dtype], jnp.nan)


def _values(x: jax.Array, scales: jax.Array, wire: Scaled) -> jax.Array:
    spread = scales[..., None]
    rounded = _cut(x, wire) / jnp.where(spread > 0, spread, 1.0)
    if wire.dtype == "int8":
        finite = jnp.where(jnp.isfinite(rounded), rounded, 0.0)  # a NaN as an integer may be anything
        values = jnp.clip(jnp.round(finite), -127, 127).astype(jnp.int8)
    else:
        values = lax.bitcast_convert_type(rounded.astype(wire.dtype), jnp.uint8)
    return _join(values, x.shape[-1])


def _decode(values: jax.Array, scales: jax.Array, wire: Scaled) -> jax.Array:
    numbers = values if wire.dtype == "int8" else lax.bitcast_convert_type(values, jnp.dtype(wire.dtype))
    return _join(_cut(numbers.astype(jnp.float32), wire) * scales[..., None], values.shape[-1])


def _cut(x: jax.Array, wire: Scaled) -> jax.Array:
    """Cut the last dimension into blocks, [..., blocks, size of a block], with zeros to fill the last block."""
    blocks, width = wire.scales(x.shape[-1]), min(wire.block, x.shape[-1])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * width - x.shape[-1])])
    return x.reshape(*x.shape[:-1], blocks, width)


def _join(blocks: jax.Array, size: int) -> jax.Array:
    """Join blocks to one dimension of this size."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])[..., :size]


_SCALES = function_primitive("wire_scales", _scales)
_VALUES = function_primitive("wire_values", _values)
_DECODE = function_primitive("wire_decode", _decode)
_BITS = function_primitive("wire_bits", lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"))
_FROM_BITS = function_primitive("wire_from_bits", lambda bits, dtype: lax.bitcast_convert_type(bits, dtype))
STEPS = tuple(one.name for one in (_SCALES, _VALUES, _DECODE, _BITS, _FROM_BITS))
"""The primitives between a stored array and a gathered weight, by which a `jax.checkpoint` policy recognises them: they
are computed again in the backward pass, and their results never saved."""
