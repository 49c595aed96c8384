"""What a user can put right, told in one line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxshard.core.our_code import is_jaxshard_file


class UsageError(Exception):
    """Wrong flags or data: the message is one line that says what to do, the exit status 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns the errors by which the library refuses what it was given into a `UsageError`.

    Only around the preparation of a command, which does nothing but check what the user asked for; what goes wrong
    later is a fault and keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """The same where the user's own functions run: what the library raises is told in one line, all else is a fault."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not is_jaxshard_file(raised_in):
            raise
        raise UsageError(" ".join(str(error).split())) from error
