"""What a user can put right, told in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
