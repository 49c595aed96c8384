"""How one of several processes ends when something is wrong: at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import TracebackType
from typing import NoReturn

from jaxshard.distributed.key_value import report_failure

INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ended."""


def leave(status: int) -> NoReturn:
    """Ends this process with an exit status, at once and whatever else is under way.

    For the end of a run that failed. A normal end waits in JAX's shutdown for all other processes, and these may be
    waiting for this one in a collective. What is printed is flushed; nothing else is tidied up: no `finally`, no
    `atexit`, no save that is still under way.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    if status:
        report_failure(f"it left with status {status}; see what it printed")
    os._exit(status)


def end_on_sigterm() -> None:
    """Gives SIGTERM back what Python knows it to do, by default to end the process: JAX, once joined, ignores it."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def leave_on_error() -> None:
    """Lets an error that nobody catches end the process by `leave`, after its traceback; not at a prompt."""
    show = sys.excepthook
    if getattr(show, "leaves", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if not hasattr(sys, "ps1"):
            first_line = f"{kind.__name__}: {error}".splitlines()[0]
            report_failure(first_line)
            leave(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    hook.leaves = True  # type: ignore[attr-defined]
    sys.excepthook = hook
