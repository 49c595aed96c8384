"""The dynamic map of Dettmers et al.: codes of a few bits for numbers from 0 to 1, spaced evenly in each decade.

Write a code n > 0 as n = 2**i + j, where i is the index of its leading one bit. The code stands for the number

    t * (0.1 + 0.9 * (j + 1) / 2**i)    with t = 10 ** (i - bits + 1), the largest number of decade i

so that each decade has twice as many codes as the decade below it, evenly spaced, and the largest code stands for
exactly 1. With 7 bits the smallest number above 0 is 1e-6, and numbers above 0.1 have an error of at most 0.0071.
Encoding and decoding are a few elementwise operations without a lookup table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

SIGN = 128
"""The sign bit of a signed code; the other seven bits are the magnitude."""


def encode_magnitude(x: Float32[Array, "*shape"], bits: int) -> UInt8[Array, "*shape"]:
    """Return the nearest code of each number in [0, 1], in the 8-bit dynamic map of Dettmers et al.

    The code 0 stands only for the number 0. So positive numbers below the number of code 1 get the code 1.

    Args:
      x: the numbers.
      bits: the number of bits of a code, 7 or 8.

    Example:
        >>> encode_magnitude(jnp.array([0.0, 1e-30, 0.1, 1.0]), 8)
        Array([  0,   1, 127, 255], dtype=uint8)
    """
    per_top = jnp.full_like(x, 10.0 ** (bits - 1))
    count = jnp.ones_like(x)
    for i in range(1, bits):
        above = x > 10.0 ** (i - bits)
        per_top = jnp.where(above, 10.0 ** (bits - 1 - i), per_top)
        count = jnp.where(above, 2.0**i, count)
    # Between the largest number of the decade below (step 0) and that of its own (step 2**i).
    step = jnp.clip(jnp.round((x * per_top - 0.1) * (count / 0.9)), 0, count)
    return jnp.maximum(count - 1 + step, jnp.where(x > 0, 1.0, 0.0)).astype(jnp.uint8)


def decode_magnitude(code: UInt8[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """Return the number in [0, 1] of each code: the inverse of `encode_magnitude`.

    Example:
        >>> decode_magnitude(jnp.array([0, 127, 255], jnp.uint8), 8)
        Array([0. , 0.1, 1. ], dtype=float32)
    """
    number = code.astype(jnp.float32)
    top, per_count = jnp.full_like(number, 10.0 ** (1 - bits)), jnp.ones_like(number)
    for i in range(1, bits):
        reached = number >= 2.0**i
        top = jnp.where(reached, 10.0 ** (i - bits + 1), top)
        per_count = jnp.where(reached, 2.0**-i, per_count)
    # (j + 1) / 2**i with n = 2**i + j; as a distance from the top, so that the largest code is 1 without rounding.
    below_top = 2 - (number + 1) * per_count
    return jnp.where(number > 0, top * (1 - 0.9 * below_top), 0.0)


def encode_signed(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Return the nearest code of each number in [-1, 1]: a sign and 7 bits of magnitude.

    Example:
        >>> decode_signed(encode_signed(jnp.array([-1.0, 0.0, 1.0])))
        Array([-1.,  0.,  1.], dtype=float32)
    """
    magnitude = encode_magnitude(jnp.abs(x), 7)
    return jnp.where(x < 0, magnitude | jnp.uint8(SIGN), magnitude)


def decode_signed(code: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the number in [-1, 1] of each code: the inverse of `encode_signed`."""
    magnitude = decode_magnitude(code & jnp.uint8(SIGN - 1), 7)
    negative: jax.Array = jnp.where(code >= SIGN, -magnitude, magnitude)
    return negative
