"""Read parts of tensors in files, so that a process reads only what it needs, and keeps host memory small.

A part is an index range in each dimension. Each contiguous byte range of the file is read by one call. Files are not
memory-mapped, since mapped pages stay in memory until they are unmapped, and count as the process's memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxshard.storage.copies import CHUNK, read_range
from jaxshard.storage.paths import ObjectPath

_MOST = 1 << 22
"""The largest number of bytes to read at once, when gaps are read too."""

Fill = Callable[[memoryview, int], int]
"""Fill a buffer with the bytes of a file from a position on, and return how many there were; 0 at the end."""


class Range(NamedTuple):
    """A range of indices in one dimension, from `start` to `end - 1`."""

    start: int
    end: int


class Source(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
      file: the path of the file, or an object.
      offset: the first byte of the tensor in the file.
      dtype: the dtype of the tensor.
    """

    file: str | ObjectPath
    offset: int
    dtype: str


def read_part(source: Source, shape: Sequence[int], ranges: Sequence[Range]) -> NDArray[Any]:
    """Read a part of a tensor from its file: a range of indices in each dimension.

    Args:
      source: the place of the tensor in its file.
      shape: the shape of the tensor.
      ranges: the indices to read, for each dimension.

    Returns:
      A new array with the part, in C order.

    Raises:
      OSError: the file can't be read, or ends before the part does.
    """
    lengths = [end - start for start, end in ranges]
    part = allocate(lengths, jnp.dtype(source.dtype))
    if not part.size:
        return part
    cut = next((dim for dim in reversed(range(len(shape))) if lengths[dim] < shape[dim]), 0)  # the last that is cut
    with _open(source.file) as fill:
        if cut and math.prod(lengths[cut:]) * part.itemsize < least_run(source.file):
            _read_rows(fill, source, shape, ranges, cut, part)
        else:
            raw, size = part.reshape(-1).view(np.uint8), math.prod(lengths[cut:]) * part.itemsize
            for number, first in enumerate(_firsts(shape, ranges, cut)):
                _read_into(fill, source, first * part.itemsize, raw[number * size : (number + 1) * size])
    return part


def least_run(file: str | ObjectPath) -> int:
    """Return the smallest size, in bytes, of a contiguous byte range that is read by a call of its own.

    Shorter ranges are read together with the gaps between them, which are dropped. A request for an object takes as
    long as a megabyte.
    """
    return 1 << 20 if isinstance(file, ObjectPath) else 1 << 10


@contextlib.contextmanager
def _open(file: str | ObjectPath) -> Iterator[Fill]:
    if isinstance(file, ObjectPath):

        def fill(buffer: memoryview, start: int) -> int:
            content = read_range(file, start, start + len(buffer)).content or b""
            buffer[: len(content)] = content
            return len(content)

        yield fill
    else:
        with open(file, "rb", buffering=0) as opened:
            yield lambda buffer, start: os.preadv(opened.fileno(), [buffer], start)


def allocate(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make an uninitialised NumPy array; a large array is allocated by mmap, not by malloc.

    malloc keeps much of the freed memory. It also does not align arrays as JAX requires on a CPU to use them without a
    copy.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < 1 << 20:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, access=mmap.ACCESS_COPY)  # private to the process
    return np.frombuffer(pages, dtype, count).reshape(shape)


def _firsts(shape: Sequence[int], ranges: Sequence[Range], cut: int) -> Iterator[int]:
    """Yield the flat index into the tensor at which each contiguous range of elements of a part begins.

    There is one contiguous range for each combination of the part's indices in the dimensions before `cut`. In
    dimension `cut` a range begins at the part's first index, and in all later dimensions at index 0. For example, for
    the shape [4, 8], the part [1:3, 2:5] and cut=1 the result is 10, 18.
    """
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = ranges[cut].start * steps[cut] if shape else 0
    for index in product(*(range(*one) for one in ranges[:cut])):
        yield start + sum(at * step for at, step in zip(index, steps))


def _read_rows(
    fill: Fill, source: Source, shape: Sequence[int], ranges: Sequence[Range], cut: int, part: NDArray[Any]
) -> None:
    """Fill `part` from complete rows of the tensor: read up to 4 MiB of rows at once, and keep the part's elements.

    A row has the elements at one index of dimension `cut - 1` and all indices of the later dimensions.
    """
    dim, row = cut - 1, math.prod(shape[cut:])
    together = max(1, _MOST // (row * part.itemsize))
    flat = part.reshape(-1, *part.shape[dim:])
    for number, first in enumerate(_firsts(shape, ranges, dim)):
        for at in range(0, part.shape[dim], together):
            count = min(together, part.shape[dim] - at)
            rows = np.empty((count, *shape[cut:]), part.dtype)
            _read_into(fill, source, (first + at * row) * part.itemsize, rows.reshape(-1).view(np.uint8))
            flat[number, at : at + count] = rows[(slice(None), *(slice(*one) for one in ranges[cut:]))]


def _read_into(fill: Fill, source: Source, start: int, raw: NDArray[np.uint8]) -> None:
    """Fill `raw` with the bytes of a tensor, from the tensor's byte `start` on."""
    done, rest = 0, raw.data
    while done < len(rest):
        count = fill(rest[done : done + CHUNK], source.offset + start + done)
        if count <= 0:
            raise OSError(f"{source.file}: it ends before its tensors do; it was cut off while it was read")
        done += count
