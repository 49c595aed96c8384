"""Pack columns of small integers into 32-bit words.

A schedule's table is a constant in the compiled program, which reads a row per tick. Packed, the constant is small, and
a device reads only one or two words per tick. A column takes the bits that its values need above their minimum:

    column        values      low   bits        word 0 of a row
    f_chunk       0, 1          0     1         bit  0
    f_microbatch  -1, ..., 7   -1     4         bits 1 to 4       value = low + ((word >> 1) & 0b1111)
    f_inbox       2, 2, 2       2     0         none: a column that never changes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

BITS = 32


class _Field(NamedTuple):
    """The bits of a column in a packed row: the column's value is `low + ((words[word] >> shift) & mask)`."""

    word: int
    shift: int
    mask: int
    low: int


def pack_columns(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
    """Pack several integer arrays of the same shape (columns) into an array of 32-bit words.

    Returns:
      (words, unpack). `words` is uint32 [*shape, number of words]. `unpack(words[i])` returns {column: int32 value in
      row i}; it takes NumPy and JAX arrays of any leading shape.
    """
    fields: dict[str, _Field] = {}
    word, shift = 0, 0
    for name, values in columns.items():
        low = int(values.min())
        width = (int(values.max()) - low).bit_length()
        if shift + width > BITS:  # no value spans two words
            word, shift = word + 1, 0
        fields[name] = _Field(word, shift, (1 << width) - 1, low)
        shift += width
    words = np.zeros((*next(iter(columns.values())).shape, word + 1), np.uint32)
    for name, (word, shift, _, low) in fields.items():
        words[..., word] |= (columns[name].astype(np.int64) - low).astype(np.uint32) << np.uint32(shift)

    def unpack(words: Any) -> dict[str, Any]:
        return {
            name: ((words[..., word] >> shift) & mask).astype(np.int32) + low
            for name, (word, shift, mask, low) in fields.items()
        }

    return words, unpack
