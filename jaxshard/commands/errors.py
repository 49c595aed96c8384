"""Errors that the user can put right, told in one line instead of a traceback."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxshard.core.our_code import is_jaxshard_file


class UsageError(Exception):
    """Wrong flags or data; the message is one line that says what to do, and the exit status is 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the errors by which the library refuses its input into a `UsageError`.

    Only for the preparation of a command, which does nothing but check what the user asked for. What goes wrong later
    is a fault and keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(_one_line(error)) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors that the library itself raised into a `UsageError`, where the user's own functions run too.

    An error raised in the user's code is a fault of theirs and keeps its traceback.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not is_jaxshard_file(raised_in):
            raise
        raise UsageError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
