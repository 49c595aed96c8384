"""Errors of files that name the file, which Python's own do only where a file can't be opened."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_TENSORSTORE = re.compile(r"\[os_error_code='(\d+)'\]")
"""How TensorStore tells the errno; checkpoint/compat.py speaks of it."""


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Raise an OSError of the block again with its errno and the path, alone: without the errors behind it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), error.filename or str(path)) from None


def errno_of(error: BaseException) -> int | None:
    """Return the number of an operating system's error, also of one that a library tells as a text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if found := _TENSORSTORE.search(str(error)):
        return int(found[1])
    return next((number for number in errno.errorcode if os.strerror(number) in str(error)), None)
