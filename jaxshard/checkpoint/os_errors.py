"""Make the exception of a failed save: an OSError with the errno of its cause."""

from __future__ import annotations

from jaxshard.core.file_errors import errno_of


def first_cause(error: BaseException) -> BaseException:
    """Return the actual error: the end of the chain of `__cause__`, since Orbax raises its own exceptions from it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def os_error(message: str, cause: BaseException) -> OSError:
    """Make an OSError with a new message and the errno of its cause.

    The errno also selects the class, such as PermissionError.

    Args:
      message: the complete text of the new error.
      cause: an OSError, or an error of TensorStore. If it has no errno, the new error has none either.
    """
    number = errno_of(cause)
    kind = OSError if number is None else type(OSError(number, message))
    error = kind(message)  # and not (number, message), which would put the number in front of the text
    error.errno = number
    return error
