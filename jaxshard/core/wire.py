"""Quantized formats in which arrays are communicated between devices in fewer bytes.

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

import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e3m4": 15.5, "float8_e4m3fn": 448.0}
"""{dtype of scaled numbers: its largest number}."""

SCALE_BYTES = 4


@dataclass(frozen=True)
class Scaled:
    """The format of blocks of 8-bit numbers with a scale in f32 each; made by `js.wire.int8` and `js.wire.fp8`.

    Attributes:
      dtype: the dtype of the numbers: "int8", "float8_e3m4" or "float8_e4m3fn".
      block: how many numbers share a scale; the last block of an array may have fewer.
      feedback: True if a step adds the rounding error of the step before to each device's share of a gradient.

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

    @property
    def carrier(self) -> Any:
        """The dtype that a program sends: uint8 for 8-bit floats, because some compilers cast them to larger ones."""
        return jnp.dtype(jnp.int8 if self.dtype == "int8" else jnp.uint8)

    def scales(self, size: int) -> int:
        """Return the number of scales of an array of `size` numbers."""
        return -(-size // self.block)

    def shrinks(self, size: int, dtype: Any) -> bool:
        """Return True if an array has fewer bytes in this format; other arrays are sent as they are."""
        return bool(size + SCALE_BYTES * self.scales(size) < size * jnp.dtype(dtype).itemsize)


def int8(*, block: int = 256, feedback: bool = False) -> Scaled:
    """Make the format of int8 numbers in blocks: each number is off by at most half of its block's scale.

    The scale is the largest magnitude of the block over 127, so that the error is at most 1/254 of that.

    Args:
      block: how many numbers share an f32 scale.
      feedback: keep the rounding error of a gradient, and add it in the next step; see `js.explicit`. Not for
        gathers of weights.

    Raises:
      ValueError, TypeError: an argument has another value or type; the message names it.

    Example:
        js.explicit(reduce_dtype=js.wire.int8())                                    # gradients
        js.explicit(reduce_dtype=js.wire.int8(feedback=True), scatter="end")        # ... with error feedback
        js.explicit(gather_dtype=js.wire.int8(block=128))                           # weights
    """
    return Scaled("int8", block, feedback)


def fp8(*, mantissa: int = 4, block: int = 256, feedback: bool = False) -> Scaled:
    """Make the format of 8-bit floats in blocks: each number is off by at most 1/32 of itself, or a little more.

    Compared with int8, small numbers in a block with a large number keep more precision, and large numbers less. The
    scale maps the largest number of a block to the largest of the format, so a format needs few bits for exponents:

        mantissa  format  a number is off by at most     but no less than, of the largest in its block
        4         e3m4    1/32 of itself                 1/1984
        3         e4m3    1/16 of itself                 1/458752

    Args:
      mantissa: bits of the mantissa, 4 or 3.
      block: how many numbers share an f32 scale.
      feedback: as in `js.wire.int8`.

    Raises:
      ValueError, TypeError: an argument has another value or type; the message names it.

    Example:
        engine = js.explicit(gather_dtype=js.wire.fp8(), reduce_dtype=js.wire.int8())
    """
    if mantissa not in (3, 4) or isinstance(mantissa, bool):
        raise ValueError(f"js.wire.fp8: mantissa must be 4 (e3m4) or 3 (e4m3), got {mantissa!r}")
    return Scaled("float8_e3m4" if mantissa == 4 else "float8_e4m3fn", block, feedback)
