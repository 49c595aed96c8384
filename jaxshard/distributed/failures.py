"""One process fails: the others learn of it, wait for it no longer, and end with its exit status.

JAX aborts (SIGABRT) every process that loses the coordinator, which lives in process 0, and a supervisor starts a run
again after an abort, though not after wrong flags. So process 0, when it fails, ends last, and all others end with its
status. In the key-value store, with process numbers <p>:

    jaxshard/failed/<p>      a process that ends by an error: [its name, why, its exit status]
    jaxshard/parting/<p>     "heard": it knows that another one failed; "left": it ends in this moment

    the process that fails       every other one, in a thread
    --------------------------   ---------------------------------------------------------------------
    put  failed/<p>         -->  get  failed/        once a second
    process 0 alone:        <--  put  parting/<p>    heard
      wait until all have        5 seconds for the main thread to end by itself, with its own message
      left, some seconds    <--  put  parting/<p>    left
    end                          end, with the status of the process that failed
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxshard.core.compat import call_before_exit, coordinator_client, list_keys, process_count_and_id, put_key

TRY_AGAIN = 75
"""The exit status where another process is missing: EX_TEMPFAIL of sysexits.h. A new start of all may help."""
WRONG_USAGE = 2
"""The exit status for wrong flags, and for processes that were given different ones: no new start helps."""
_FAILED = "jaxshard/failed/"
_PARTING = "jaxshard/parting/"
_STORE_WITHIN = 2.0
"""Seconds that a message to the store may take: one that does not answer must not keep a process from ending."""
_INTERVAL = 1.0
"""Seconds between two looks for failures; more with hundreds of processes."""
_GRACE = 5.0
"""Seconds in which the main thread may end by itself after another process has failed."""
_ANSWER = 2.0
"""Seconds after an interval in which a process that is there has answered that it heard of a failure."""
_LAST = 0.5
"""Seconds for which process 0 stays when all have left: between its last message and its end a process is aborted."""

_closed = threading.Event()  # nobody looks for failures any more: this process ends


class MissingProcess(RuntimeError):
    """A process for which this one waits is not there: it never came, or it has failed. A new start may help.

    Attributes:
      exit_status: with which a process ends that does not catch the error: 75 ("try again") if the other one never
        came, and that of the other one if it failed.

    Example:
        try:
            js.distributed.initialize()
        except js.distributed.MissingProcess as error:
            print(error)    # which process never came
            raise SystemExit(75)
    """

    def __init__(self, message: str, exit_status: int = TRY_AGAIN):
        super().__init__(message)
        self.exit_status = exit_status


class Failure(NamedTuple):
    """The report of a process that ended: its name, such as "process 1 (host b)", why, and its exit status."""

    name: str
    why: str
    status: int


def report_failure(why: str, status: int) -> None:
    """Tell the other processes that this one ends. In a single process, do nothing.

    Only the first report of a process counts. Returns after two seconds even if the store does not answer.
    """
    store, process = coordinator_client(), process_count_and_id()[1]
    if store is not None:
        note = json.dumps(Failure(f"process {process} (host {socket.gethostname()})", why, status))
        _try(lambda: put_key(store, f"{_FAILED}{process}", note))


def list_failures(store: Any) -> dict[int, Failure]:
    """Return what every process that failed has reported, by number."""
    return {int(process): Failure(*json.loads(note)) for process, note in list_keys(store, _FAILED).items()}


def common_status(failures: Sequence[Failure]) -> int:
    """Return the exit status for those that end because others failed: 2 if one was given wrong flags."""
    statuses = [failure.status for failure in failures]
    return WRONG_USAGE if WRONG_USAGE in statuses else max(statuses)


def end_with_others() -> None:
    """Start the thread that ends this process some seconds after another one has reported a failure."""
    store, (count, process) = coordinator_client(), process_count_and_id()
    _closed.clear()
    thread = threading.Thread(target=_watch, args=(store, process, count), name="failures", daemon=True)
    thread.start()

    def close() -> None:
        # A thread that is in a call of JAX's client while Python ends would abort the process.
        _closed.set()
        thread.join()

    call_before_exit(close)


def part() -> None:
    """Take leave of the other processes, as the last thing before this one ends with an error.

    Process 0 waits until the others have left, because JAX aborts those that use the store when it ends: a second if
    all end, some ten if one of them takes its time, and three for those that do not answer.
    """
    _closed.set()
    store, (count, process) = coordinator_client(), process_count_and_id()
    if store is None:
        return
    if process:
        _try(lambda: put_key(store, f"{_PARTING}{process}", "left", overwrite=True))
    else:
        _try(lambda: _wait_until_left(store, count), seconds=_interval(count) + _GRACE + 5.0)


def _watch(store: Any, process: int, count: int) -> None:
    """The loop of the thread."""
    while not _closed.wait(_interval(count)):
        try:
            failed = [failure for other, failure in list_failures(store).items() if other != process]
            if failed:
                put_key(store, f"{_PARTING}{process}", "heard", overwrite=True)
        except RuntimeError:  # process 0 is gone, and with it the store: JAX ends this process
            return
        if failed:
            if not _closed.wait(_GRACE):
                _end(failed)
            return


def _end(failed: Sequence[Failure]) -> None:
    status = common_status(failed)
    lines = "".join(f"\n  - {name}: {why}" for name, why, _ in failed)
    # Not `print`: the main thread may hold the lock of standard error for ever.
    os.write(2, f"jaxshard: this process ends with status {status}, because another one failed{lines}\n".encode())
    part()
    os._exit(status)


def _wait_until_left(store: Any, count: int) -> None:
    """Wait until all others have left, as long as those that are there have not."""
    start = time.monotonic()
    while True:
        states = [state for process, state in list_keys(store, _PARTING).items() if process != "0"]
        answered = len(states) == count - 1 or time.monotonic() - start > _interval(count) + _ANSWER
        if answered and all(state == "left" for state in states):
            break
        time.sleep(0.05)
    time.sleep(_LAST)


def _interval(count: int) -> float:
    return _INTERVAL + 0.01 * count


def _try(call: Callable[[], Any], seconds: float | None = None) -> None:
    """Call the store, and return after some seconds whatever becomes of the call."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # it is gone, or has this report already
            call()

    # A thread: a call to a store that has died would block for minutes.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_WITHIN if seconds is None else seconds)
