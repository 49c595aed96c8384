"""Add the file's path to OSErrors, since Python names it only if a file can't be opened."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_TENSORSTORE = re.compile(r"\[os_error_code='(\d+)'\]")
"""Finds the errno in a message of TensorStore; see checkpoint/compat.py."""


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Return a context that re-raises an OSError `from None`, and fills in `path` if the error names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), error.filename or str(path)) from None


def errno_of(error: BaseException) -> int | None:
    """Return the errno of an error, even if a library has it only in the text of its message; None without an errno."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if found := _TENSORSTORE.search(str(error)):
        return int(found[1])
    return next((number for number in errno.errorcode if os.strerror(number) in str(error)), None)
