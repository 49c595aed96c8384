"""Formats in which arrays are communicated between devices in fewer bytes; `Format` is what all of them have in common.

A format of `Scaled` numbers cuts an array into blocks of 256 numbers. Each block is sent as one f32 scale and 8 bits
per number, in int8 for example:

    block       0.5   -1.27   0.333 ...     the largest is 1.27
    scale       1.27 / 127 = 0.01
    on the wire  50    -127      33 ...     1 byte for each number, and 4 for each block
    arrives     0.5   -1.27    0.33 ...     no number is off by more than half a scale

A block of 256 numbers takes 260 bytes instead of 1,024 in f32: 3.94 times fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = {"int8": 127.0, "float8_e3m4": 15.5, "float8_e4m3fn": 448.0}
"""{dtype of scaled numbers: its largest number}."""


class Format:
    """The base class of all formats: subclass it for `reduce_dtype` or `gather_dtype` of `js.explicit`.

    A format encodes f32[size] as one or several arrays, and decodes them. The engine sends each of the arrays in a
    collective, and computes with the decoded result. From the shapes that `encode` returns it derives the bytes that
    `js.audit` promises. An array that would have no fewer bytes is sent as it is.

    A format is a part of the compiled program, so it must be hashable: a frozen dataclass, or a class without fields.

    Attributes:
      feedback: True to keep the rounding error of each device's gradient and add it in the next step (error feedback).

    Example:
        class Halves(js.wire.Format):  # sends bf16, adds in f32
            def encode(self, x):
                return x.astype(jnp.bfloat16)

            def decode(self, sent, size):
                return sent.astype(jnp.float32)

        engine = js.explicit(reduce_dtype=Halves(), gather_dtype=Halves())
    """

    feedback: bool = False

    def encode(self, x: jax.Array) -> Any:
        """Encode an array as one or several arrays to send.

        It must be a pure function that `jax.vmap` can map. Infinite and NaN numbers must be infinite or NaN after
        `decode`, since a step recognises bad gradients by them.

        Args:
          x: f32[size], for any size from 1 on: the flattened numbers that one device sends.

        Returns:
          An array or a tree of arrays of any shapes and dtypes, also scalars. Floats of fewer than 32 bits are sent
          as their bits. Numbers of fewer than 8 bits must be packed into bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encode")

    def decode(self, sent: Any, size: int) -> jax.Array:
        """Return the array that was encoded, f32[size] up to rounding, from the result of `encode`."""
        raise NotImplementedError(f"{type(self).__name__} has no decode")

    @property
    def name(self) -> str:
        """A short description of the format, as commands and errors show it."""
        return repr(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True)
class Scaled(Format):
    """The format of 8-bit numbers in blocks, each with a scale in f32; made by `js.wire.int8` and `js.wire.fp8`.

    Attributes:
      dtype: the dtype of the numbers: "int8", "float8_e3m4" or "float8_e4m3fn".
      block: how many numbers share a scale; the last block of an array may have fewer.
      feedback: True to keep the rounding error of each device's gradient and add it in the next step (error feedback).

    Example:
        engine = js.explicit(reduce_dtype=js.wire.int8())
    """

    dtype: str
    block: int = 256
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            raise ValueError(f"js.wire: the dtype must be one of {', '.join(map(repr, LARGEST))}, got {self.dtype!r}")
        if not isinstance(self.block, Integral) or isinstance(self.block, bool) or self.block < 2:
            raise ValueError(f"js.wire: block must be a whole number from 2 on, got {self.block!r}")
        if not isinstance(self.feedback, bool):
            raise TypeError(f"js.wire: feedback must be True or False, got {self.feedback!r}")

    @property
    def name(self) -> str:
        """A short description of the format, such as "int8 in blocks of 256"."""
        return f"{self.dtype} in blocks of {self.block}" + (" with feedback" if self.feedback else "")

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantize f32[size] in blocks; return (8-bit numbers [size], their scales f32[blocks]).

        The numbers are int8, or uint8 with the bits of 8-bit floats. A block with an infinite or NaN number has the
        scale NaN, so that the receiver decodes all of it as NaN.
        """
        blocks = self._cut(x)
        largest = jnp.max(jnp.abs(blocks), axis=1)
        scales = jnp.where(jnp.isfinite(largest), largest / LARGEST[self.dtype], jnp.nan)
        spread = scales[:, None]
        values = blocks / jnp.where(spread > 0, spread, 1.0)
        if self.dtype == "int8":
            finite = jnp.where(jnp.isfinite(values), values, 0.0)  # a NaN as an integer may be anything
            values = jnp.clip(jnp.round(finite), -127, 127).astype(jnp.int8)
        else:  # as bits before they are cut, since a CPU's compiler would cut them in f16
            values = lax.bitcast_convert_type(values.astype(self.dtype), jnp.uint8)
        return values.reshape(-1)[: x.size], scales

    def decode(self, sent: tuple[jax.Array, jax.Array], size: int) -> jax.Array:
        """Decode the 8-bit numbers and scales that `encode` returned to f32[size]."""
        values, scales = sent
        if self.dtype != "int8":
            values = lax.bitcast_convert_type(values, jnp.dtype(self.dtype))
        return (self._cut(values.astype(jnp.float32)) * scales[:, None]).reshape(-1)[:size]

    def _cut(self, x: jax.Array) -> jax.Array:
        """Reshape an array to [blocks, size of a block], with zeros to fill the last block."""
        width = min(self.block, x.size)
        return jnp.pad(x, (0, -x.size % width)).reshape(-1, width)


def int8(*, block: int = 256, feedback: bool = False) -> Scaled:
    """Make the format of int8 numbers in blocks: each number is off by at most half of its block's scale.

    The scale is the largest magnitude in the block over 127, so the error is at most 1/254 of this magnitude.

    Args:
      block: how many numbers share an f32 scale.
      feedback: keep the rounding error of a gradient, and add it in the next step; see `js.explicit`. Not for
        gathers of weights.

    Raises:
      ValueError, TypeError: an argument has a value or type that is not allowed; the message names it.

    Example:
        js.explicit(reduce_dtype=js.wire.int8())                                    # gradients
        js.explicit(reduce_dtype=js.wire.int8(feedback=True), scatter="end")        # ... with error feedback
        js.explicit(gather_dtype=js.wire.int8(block=128))                           # weights
    """
    return Scaled("int8", block, feedback)


def fp8(*, mantissa: int = 4, block: int = 256, feedback: bool = False) -> Scaled:
    """Make the format of 8-bit floats in blocks: each number is off by at most 1/32 of itself, unless it is tiny.

    Compared with int8, small numbers in a block with a large number keep more precision, and large numbers less. The
    scale maps the largest number of a block to the largest of the format, so a format needs few bits for exponents. The
    error of a number is at most the larger of two bounds:

        mantissa  format  relative to the number     relative to the largest number in its block
        4         e3m4    1/32                       1/1984
        3         e4m3    1/16                       1/458752

    Args:
      mantissa: bits of the mantissa, 4 or 3.
      block: how many numbers share an f32 scale.
      feedback: as in `js.wire.int8`.

    Raises:
      ValueError, TypeError: an argument has a value or type that is not allowed; the message names it.

    Example:
        engine = js.explicit(gather_dtype=js.wire.fp8(), reduce_dtype=js.wire.int8())
    """
    if mantissa not in (3, 4) or isinstance(mantissa, bool):
        raise ValueError(f"js.wire.fp8: mantissa must be 4 (e3m4) or 3 (e4m3), got {mantissa!r}")
    return Scaled("float8_e3m4" if mantissa == 4 else "float8_e4m3fn", block, feedback)
