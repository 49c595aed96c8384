"""The end of one of several processes when something is wrong: `leave` does it at once.

It reports the failure before it ends, so that nobody waits for it and all end with the same status (`failures.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from jaxshard.distributed.failures import part, report_failure

INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ended (128 + 2)."""


def leave(status: int) -> NoReturn:
    """End this process with an exit status, at once, whatever else is under way.

    Use it where one of several processes gives up alone. A normal end, `sys.exit` included, waits in JAX's shutdown for
    all other processes, and these may be waiting for this one in a collective: both would wait for ever. What was
    printed is flushed, and the other processes are told: they end with the same status, soon where they wait for this
    one at `js.init`, `js.batches` and the like, and otherwise five seconds after they heard of it. Nothing else is
    tidied up: no `finally`, no `atexit`, no save that is still being written.

        if not os.path.exists(path):
            print(f"no data at {path}", file=sys.stderr)
            js.distributed.leave(1)

    An error that nobody catches does the same after `js.distributed.initialize`.

    Args:
      status: the exit status; anything but 0 is reported to the other processes as a failure, and process 0 ends some
        seconds later than they do, because it holds what JAX needs in all of them.

    Example:
        try:
            run = js.fit(run, step, batches, steps=1000)
        except ConnectionError:
            js.distributed.leave(75)    # the other processes see that this one is gone
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    if status:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends in any case, and with its own status
        report_failure(f"it left with status {status}; see what it printed", status)
        part()
    os._exit(status)


def restore_sigterm() -> None:
    """Give SIGTERM the handler that Python knows, by default to end the process: JAX sets one that ignores it."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def leave_on_error() -> None:
    """Let an error that nobody catches end the process by `leave`, after its traceback. A second call does nothing."""
    if not isinstance(sys.excepthook, LeavingHook):
        sys.excepthook = LeavingHook(sys.excepthook)


@dataclass(frozen=True)
class LeavingHook:
    """A `sys.excepthook` that shows an error and ends the process, except at an interactive prompt.

    The exit status is 1, or the `exit_status` of the error if it has one, as `Disagreement` and `MissingProcess` do.

    Attributes:
      show: the hook before, which prints the traceback.
    """

    show: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.show(kind, error, trace)
        if not hasattr(sys, "ps1"):  # the prompt, which only an interactive Python has
            status = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else getattr(error, "exit_status", 1)
            report_failure(f"{kind.__name__}: {error}".splitlines()[0], status)
            leave(status)
