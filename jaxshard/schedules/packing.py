"""Columns of small numbers packed into words: a table is a constant of the program, and its text should stay short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

BITS = 32


class _Field(NamedTuple):
    """Where a column's number stands: `low + ((words[word] >> shift) & mask)`."""

    word: int
    shift: int
    mask: int
    low: int


def packed(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
    """(uint32 words [..., words] of columns of one shape, `unpack(words) -> number by column`).

    `unpack` takes NumPy and JAX arrays; a column that never changes takes no bit.
    """
    fields: dict[str, _Field] = {}
    word, shift = 0, 0
    for name, values in columns.items():
        low = int(values.min())
        width = (int(values.max()) - low).bit_length()
        if shift + width > BITS:
            word, shift = word + 1, 0
        fields[name] = _Field(word, shift, (1 << width) - 1, low)
        shift += width
    shape = next(iter(columns.values())).shape
    words = np.zeros((*shape, word + 1), np.uint32)
    for name, field in fields.items():
        words[..., field.word] |= (columns[name].astype(np.int64) - field.low).astype(np.uint32) << np.uint32(
            field.shift
        )

    def unpack(words: Any) -> dict[str, Any]:
        return {
            name: ((words[..., one.word] >> one.shift) & one.mask).astype(np.int32) + one.low
            for name, one in fields.items()
        }

    return words, unpack
