"""Tell failures of standard output and standard error apart from all other errors."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from jaxshard.commands.errors import UsageError


class OutputError(Exception):
    """Raised if standard output or error can't be written; the message is "" if the reader of a pipe is gone."""

    def __init__(self, name: str, error: OSError) -> None:
        gone = error.errno == errno.EPIPE
        super().__init__("" if gone else f"{name} can't be written: {error.strerror or error}")
        self.exit_status = 141 if gone else 2
        """The exit status: 141, as a shell says of a program that SIGPIPE ended, where the reader is gone."""


class _Stream:
    """Wraps a text stream: raises `OutputError` if it can't be written, and behaves like the stream otherwise."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._give_up(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._give_up(error) from None

    def _give_up(self, error: OSError) -> OutputError:
        # Discard the rest of the buffer, or Python complains about it when the process ends.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        return OutputError(self._name, error)


@contextlib.contextmanager
def checked_streams() -> Iterator[None]:
    """Make standard output and error raise `OutputError`, and write characters that their encoding lacks as escapes.

    Raises:
      OutputError: a stream can't be written; raised at the latest when the `with` block ends and flushes both streams.
      UsageError: a stream is closed. The next file that is opened would get its number, and receive the output.
    """
    names = {"stdout": "standard output", "stderr": "standard error"}
    for stream, name in names.items():
        if getattr(sys, stream) is None:
            raise UsageError(f"{name} is closed; redirect it to a file, or to /dev/null")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(_check(stack, sys.stdout, names["stdout"])))
        stack.enter_context(contextlib.redirect_stderr(_check(stack, sys.stderr, names["stderr"])))
        yield
        sys.stdout.flush()
        sys.stderr.flush()


def _check(stack: contextlib.ExitStack, stream: TextIO, name: str) -> TextIO:
    if isinstance(stream, io.TextIOWrapper):
        stack.callback(stream.reconfigure, errors=stream.errors)
        stream.reconfigure(errors="backslashreplace")
    return cast(TextIO, _Stream(stream, name))
