"""Errors that the user can correct, printed in one line instead of a traceback."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxshard.core.bounds import is_too_large
from jaxshard.core.our_code import is_jaxshard_file

_LIBRARY = os.path.dirname(os.__file__)
"""The folder of Python's library and of what is installed."""


class UsageError(Exception):
    """Raised for wrong flags or data: the command prints its message of one line and ends with status 2."""

    exit_status = 2


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Convert ValueError, OSError and ImportError inside the `with` block to a `UsageError`, without a traceback.

    Use it only where a command checks flags and data. An error after that is a bug, and keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(_one_line(error)) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Convert TypeError, ValueError and TimeoutError that jaxshard raises inside the `with` block to a `UsageError`.

    The block may also run the user's functions, such as the loss. An error that they raise keeps its traceback.
    """
    try:
        yield
    except (TypeError, ValueError, TimeoutError) as error:
        if not is_jaxshard_file(traceback.extract_tb(error.__traceback__)[-1].filename):
            raise
        raise UsageError(_one_line(error)) from error


def refuse(why: str, **flags: int | str | Path | None) -> None:
    """Raise ValueError if any of `flags` is given: the message has its name and value, then `why` it is refused."""
    for name, value in flags.items():
        if value is not None and value is not False:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"--{name.replace('_', '-')}{shown} {why}")


class FileError(UsageError):
    """Raised if a file can't be read or written while a command runs: it prints one line and ends with status 1.

    If the cause has an `exit_status` of its own, such as 75 of a lost lease, the command ends with that.
    """

    def __init__(self, cause: OSError):
        super().__init__(_one_line(cause))
        self.exit_status = getattr(cause, "exit_status", 1)


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Convert an OSError that jaxshard raises inside the `with` block to a `FileError`; others keep their traceback."""
    try:
        yield
    except OSError as error:
        if not _is_ours(error):
            raise
        raise FileError(error) from error


@contextlib.contextmanager
def size_errors() -> Iterator[None]:
    """Convert an error that `is_too_large` to a `UsageError`, unless the user's own code raised it."""
    try:
        yield
    except BaseException as error:
        if not is_too_large(error) or not _is_ours(error):
            raise
        what = _one_line(error) or type(error).__name__
        raise UsageError(f"a number in the flags or files is too large: {what}; give a smaller one") from error


def _is_ours(error: BaseException) -> bool:
    """Return True if jaxshard, or a library that it called, raised an error; False if the user's code did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_jaxshard_file(frame.filename):
            return True
        if not frame.filename.startswith((_LIBRARY, "<frozen")):
            return False
    return False


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
