"""The end of one of several processes when something is wrong: `leave` does it at once.

It reports the failure before it ends, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from jaxshard.core.compat import coordinator_client, list_keys, process_count_and_id, put_key

_FAILED = "jaxshard/failed/"
_REPORT_WITHIN = 2.0
"""Seconds that `report_failure` may take: a store that does not answer must not keep a process from ending."""
INTERRUPTED = 130
"""The exit status of a process that Ctrl-C ended (128 + 2)."""


def leave(status: int) -> NoReturn:
    """End this process with an exit status, at once, whatever else is under way.

    Use it where one of several processes gives up alone. A normal end, `sys.exit` included, waits in JAX's shutdown for
    all other processes, and these may be waiting for this one in a collective: both would wait for ever. What was
    printed is flushed, and processes that wait for this one at `js.init`, `js.batches` and the like are told that it
    failed. Nothing else is tidied up: no `finally`, no `atexit`, no save that is still being written.

        if not os.path.exists(path):
            print(f"no data at {path}", file=sys.stderr)
            js.distributed.leave(1)

    An error that nobody catches does the same after `js.distributed.initialize`.

    Args:
      status: the exit status; anything but 0 is reported to the other processes as a failure.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    if status:
        report_failure(f"it left with status {status}; see what it printed")
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

    Attributes:
      show: the hook before, which prints the traceback.
    """

    show: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.show(kind, error, trace)
        if not hasattr(sys, "ps1"):  # the prompt, which only an interactive Python has
            report_failure(f"{kind.__name__}: {error}".splitlines()[0])
            leave(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def report_failure(why: str) -> None:
    """Tell the processes that wait for this one that it won't come. In a single process, do nothing.

    Only the first report of a process counts. Returns after two seconds even if the store does not answer.
    """
    store = coordinator_client()
    if store is None:
        return
    process = process_count_and_id()[1]
    note = json.dumps([f"process {process} (host {socket.gethostname()})", why])

    def report() -> None:
        with contextlib.suppress(RuntimeError):  # reported before, or the store is gone
            put_key(store, f"{_FAILED}{process}", note)

    # A thread: a call to a store that has died would block for minutes.
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    thread.join(_REPORT_WITHIN)


def list_failures(store: Any) -> list[tuple[str, str]]:
    """Return (name of the process, why) of every process that reported a failure."""
    return [(name, why) for name, why in map(json.loads, list_keys(store, _FAILED).values())]
