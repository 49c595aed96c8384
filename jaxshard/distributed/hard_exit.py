"""`leave`: end one of several processes at once, after an error.

The process reports its failure first, so that the others stop waiting and end with the same status (`failures.py`).
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

from jaxshard.distributed.failures import explain_by_others, part, report_failure
from jaxshard.distributed.links import close_links

INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ended (128 + 2)."""


def leave(status: int) -> NoReturn:
    """End this process at once with an exit status.

    Use it if only one of several processes gives up. A normal exit, `sys.exit` included, waits in JAX's shutdown for
    all other processes. If these wait for this process in a collective, all processes would wait forever. `leave`
    flushes the output and tells the other processes, which end with the same status: immediately if they wait for this
    process at `js.init`, `js.batches` and the like, otherwise five seconds after they read the report. `leave` runs no
    `finally` and no `atexit`, and does not finish a save that is being written.

        if not os.path.exists(path):
            print(f"no data at {path}", file=sys.stderr)
            js.distributed.leave(1)

    After `js.distributed.initialize` an uncaught error does the same.

    Args:
      status: the exit status; any other than 0 is reported to the other processes as a failure, and process 0 then ends
        some seconds after them, because JAX's coordinator runs in it.

    Example:
        try:
            run = js.fit(run, step, batches, steps=1000)
        except ConnectionError:
            js.distributed.leave(75)    # the other processes end, too
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, or a broken pipe
            stream.flush()
    if status:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway; keep its own exit status
        report_failure(f"it left with status {status}; see what it printed", status)
        part()
    close_links()
    os._exit(status)


def restore_sigterm() -> None:
    """Replace JAX's handler of SIGTERM, which ignores the signal, by Python's, which by default ends the process."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def leave_on_error() -> None:
    """Make an uncaught error end the process by `leave`, after its traceback is printed. A second call does nothing."""
    if not isinstance(sys.excepthook, LeavingHook):
        sys.excepthook = LeavingHook(sys.excepthook)


@dataclass(frozen=True)
class LeavingHook:
    """A `sys.excepthook` that shows an error and ends the process by `leave`, except at an interactive prompt.

    The exit status is the error's attribute `exit_status`, which `Disagreement` and `MissingProcess` have; 130 after
    Ctrl-C. For other errors it is that of the processes that failed before, which are printed; 1 if there are none.

    Attributes:
      show: the previous hook, which prints the traceback.
    """

    show: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.show(kind, error, trace)
        if not hasattr(sys, "ps1"):  # only an interactive Python has a prompt
            status = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else getattr(error, "exit_status", None)
            if status is None:
                status = explain_by_others() or 1
            report_failure(f"{kind.__name__}: {error}".splitlines()[0], status)
            leave(status)
