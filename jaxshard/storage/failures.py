"""Turn errors of TensorStore about objects into OSErrors of one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


class OutOfRange(OSError):
    """Raised if a range of bytes ends, or begins, after the end of an object."""


_STATUS = re.compile(r"(?:.*?: )??([A-Z_]{4,}): (.*)", re.DOTALL)
"""Finds the status and the message in the text of an error: "NOT_FOUND: NoSuchBucket: The specified bucket ..."."""
_ERRORS: dict[str, type[OSError]] = {
    "NOT_FOUND": FileNotFoundError,
    "PERMISSION_DENIED": PermissionError,
    "UNAUTHENTICATED": PermissionError,
    "DEADLINE_EXCEEDED": TimeoutError,
    "OUT_OF_RANGE": OutOfRange,
    "UNAVAILABLE": ConnectionError,
    "ABORTED": ConnectionError,  # all attempts failed
}
_ADVICE = {
    PermissionError: "; check the credentials (AWS_ACCESS_KEY_ID, ~/.aws or the machine's role; for gs:// "
    "GOOGLE_APPLICATION_CREDENTIALS) and the permissions of the bucket",
    FileNotFoundError: "; create the bucket, or correct its name",
    ConnectionError: "; check the network, AWS_ENDPOINT_URL and AWS_REGION",
    TimeoutError: "; check the network, AWS_ENDPOINT_URL and AWS_REGION",
}


@contextlib.contextmanager
def naming_object(address: str) -> Iterator[None]:
    """Return a context that re-raises an error of TensorStore as an OSError of one line that begins with the address.

    Raises:
      PermissionError: credentials are missing, or do not suffice.
      FileNotFoundError: there is no such bucket.
      ConnectionError, TimeoutError: the store did not answer.
      OutOfRange: the object does not have all bytes of a range.
      OSError: any other error.
    """
    try:
        yield
    except OSError as error:
        if type(error) is not TimeoutError or str(error):
            raise
        raise TimeoutError(f"{address}: the object store did not answer in time{_ADVICE[TimeoutError]}") from None
    except Exception as error:  # TensorStore raises ValueError for most errors of a store, and other types for some
        raise _os_error(address, error) from None


def raise_unreachable(address: str, error: Exception) -> None:
    """Raise OSError if an error of TensorStore says that a store can't be reached or refuses; otherwise return."""
    found = _os_error(address, error)
    if isinstance(found, ConnectionError | TimeoutError | PermissionError):
        raise found from None


def _os_error(address: str, error: Exception) -> OSError:
    text = " ".join(str(error).split())
    found = _STATUS.match(text)
    kind = _ERRORS.get(found[1], OSError) if found else OSError
    reason = (found[2] if found else text).partition(" [")[0]
    if "AccessDenied" in text or "http_response_code='403'" in text:
        kind = PermissionError
    return kind(f"{address}: {reason or type(error).__name__}{_ADVICE.get(kind, '')}")
