"""Errors that the user can correct, printed in one line instead of a traceback."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxshard.core.our_code import is_jaxshard_file

_LIBRARY = os.path.dirname(os.__file__)
"""The folder of Python's library and of what is installed."""


class UsageError(Exception):
    """Wrong flags or data; the message is one line that says what to do, and the exit status is 2."""

    exit_status = 2


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors about wrong input into a `UsageError`.

    Only for the preparation of a command, which checks flags and data. A later error is a fault and keeps its
    traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(_one_line(error)) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors that the library raised into a `UsageError`, in a block that also runs the user's functions.

    An error from the user's code keeps its traceback.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not is_jaxshard_file(traceback.extract_tb(error.__traceback__)[-1].filename):
            raise
        raise UsageError(_one_line(error)) from error


def refuse(why: str, **flags: int | str | Path | None) -> None:
    """Raise ValueError for the first of some flags that is given: its name and value, and why it can't be."""
    for name, value in flags.items():
        if value is not None and value is not False:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"--{name.replace('_', '-')}{shown} {why}")


class FileError(UsageError):
    """A file could not be written, or read, while the command was at work; the exit status is 1."""

    exit_status = 1


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Turn an OSError that the library raised into a `FileError`; one of the user's functions keeps its traceback."""
    try:
        yield
    except OSError as error:
        if not _is_ours(error):
            raise
        raise FileError(_one_line(error)) from error


def _is_ours(error: Exception) -> bool:
    """Return True if our code raised an error or called a library that did, and False if the user's code did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_jaxshard_file(frame.filename):
            return True
        if not frame.filename.startswith((_LIBRARY, "<frozen")):
            return False
    return False


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
