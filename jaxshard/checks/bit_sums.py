"""A checksum of the bits of an array, computed on its device in one pass: `bit_sum`.

Element i with the bits w, as a 32-bit integer, adds mix(w + i * 0x9E3779B9), and the checksum is the sum modulo
2**32. `mix` is a bijection (the last steps of MurmurHash3: each of its shifts and odd factors can be undone), so at an
index i different bits always add different integers. Hence

- a change inside one element of at most 32 bits, a flipped bit above all, always changes the checksum: the sum changes
  by the difference of two different 32-bit integers, which is not 0 modulo 2**32. A 64-bit element counts as
  two elements;
- changes of several elements cancel with a probability of about 2**-32, also where they follow a pattern. (In a sum of
  words times odd factors, two flips of a top bit would always cancel.)

The checksum compares bits: 0.0 and -0.0 differ, and so do two NaNs. A bool counts as its value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from jaxshard.core.keys import words_of

_STEP = 0x9E3779B9
"""The odd factor by which an index is multiplied before it is added to an element: 2**32 over the golden ratio."""


def bit_sum(x: Shaped[Array, "*dims"]) -> UInt32[Array, ""]:
    """Return the checksum of an array's bits.

    The compiled program reads the array once, with some 15 integer operations for each element, and makes no copy.

    Args:
      x: an array of any dtype, random keys included.

    Example:
        bit_sum(jnp.float32([0.0, 1.0])) != bit_sum(jnp.float32([-0.0, 1.0]))     # a sign is a bit
    """
    parts = _parts(words_of(x))
    total = jnp.zeros((), jnp.uint32)
    for number, bits in enumerate(parts):
        place = _places(bits.shape) * jnp.uint32(len(parts)) + jnp.uint32(number)
        total += jnp.sum(_mix(bits + place * jnp.uint32(_STEP)), dtype=jnp.uint32)
    return total


def _parts(x: jax.Array) -> list[jax.Array]:
    """Return the bits of each element as uint32[*dims] arrays: one array, or two for 64-bit elements."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_parts(lax.real(x)), *_parts(lax.imag(x))]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.integer):
        width = jnp.iinfo(x.dtype).bits
    else:
        width = jnp.finfo(x.dtype).bits
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
    if width == 64:
        return [bits.astype(jnp.uint32), (bits >> 32).astype(jnp.uint32)]
    return [bits.astype(jnp.uint32)]


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Return the row-major index of each element, modulo 2**32, as a uint32 array of the given shape."""
    # Not a reshape of arange: the last two dimensions are stored in tiles on TPUs, and a reshape would copy the array.
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        place += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return place


def _mix(x: jax.Array) -> jax.Array:
    """Scramble the bits of each integer by a bijection: the finalizer of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
