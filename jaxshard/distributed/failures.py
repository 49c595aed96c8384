"""Handle the failure of a process: tell the others, so that they stop waiting and end with its exit status.

JAX aborts (SIGABRT) every process that loses the coordinator in process 0. A supervisor restarts all processes after an
abort, but should not after wrong flags. So when process 0 fails, it ends last, and all others end with its status. In
the key-value store, with process indices <p>:

    jaxshard/failed/<p>      process <p> ends by an error or is lost: [its name, why, its exit status, silent]
    jaxshard/parting/<p>     "heard": process <p> knows that another process failed; "left": it ends now

    the process that fails       every other process, in a thread
    --------------------------   ---------------------------------------------------------------------
    put  failed/<p>         -->  get  failed/        once a second
    process 0 alone:        <--  put  parting/<p>    heard
      wait until all have        5 seconds for the main thread to end by itself, with its own message
      left, some seconds    <--  put  parting/<p>    left
    end                          end, with the status of the process that failed

A process that was killed, or whose host is cut off, can't report its failure. Process 0 notices it by a link
(`links.py`), and reports it in its name with status 75. A process that has lost process 0 ends at once, with status 75.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxshard.core.compat import call_before_exit, coordinator_client, list_keys, process_count_and_id, put_key
from jaxshard.distributed.links import Links, Loss, close_links, watch_links

TRY_AGAIN = 75
"""The exit status if another process is missing: EX_TEMPFAIL of sysexits.h. A restart of all processes may help."""
WRONG_USAGE = 2
"""The exit status for wrong flags, and for processes with different flags: a restart does not help."""
_FAILED = "jaxshard/failed/"
_PARTING = "jaxshard/parting/"
_STORE_WITHIN = 2.0
"""Seconds after which a call to the key-value store is given up, so that a process can end without an answer."""
_INTERVAL = 1.0
"""Seconds between two checks for failures of other processes; longer with hundreds of processes."""
_GRACE = 5.0
"""Seconds in which the main thread may end by itself after another process has failed."""
_ANSWER = 2.0
"""Seconds, after one interval of checks, in which every living process has time to write "heard"."""
_LAST = 0.5
"""Seconds for which process 0 stays after all others wrote "left", since they end only shortly afterwards."""

_closed = threading.Event()  # set when this process ends: stop checking for failures


class MissingProcess(RuntimeError):
    """Raised while this process waits for another process that never started, or that failed.

    A restart of all processes may help.

    Attributes:
      exit_status: the exit status of a process that does not catch the error: 75 ("try again") if the other process
        never came, or the status of the other process if it failed.

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
    """The report about a process that ended or is lost.

    Attributes:
      name: the name of the process, such as "process 1 (host b)".
      why: the reason.
      status: its exit status.
      silent: True if its host does not answer, so that the others hang in a collective, and can only be ended.
    """

    name: str
    why: str
    status: int
    silent: bool = False


def report_failure(why: str, status: int) -> None:
    """Tell the other processes that this process ends, and why; do nothing if there are no others.

    Only the first report of a process is kept. Returns after two seconds even if the key-value store does not answer.

    Args:
      why: the reason, for the messages of the other processes.
      status: the exit status of this process.
    """
    store, process = coordinator_client(), process_count_and_id()[1]
    if store is not None:
        _report(store, process, Failure(f"process {process} (host {socket.gethostname()})", why, status))


def _report(store: Any, process: int, failure: Failure) -> None:
    _try(lambda: put_key(store, f"{_FAILED}{process}", json.dumps(failure)))


def list_failures(store: Any) -> dict[int, Failure]:
    """Read the reports of all processes that failed from the key-value store; return {process index: report}."""
    return {int(process): Failure(*json.loads(note)) for process, note in list_keys(store, _FAILED).items()}


def explain_by_others() -> int | None:
    """Print which other processes failed before this one, since its own error may only follow from that.

    Returns:
      The exit status of this process; None if no other process has reported a failure.
    """
    store, process = coordinator_client(), process_count_and_id()[1]
    found: dict[int, Failure] = {}
    if store is not None:
        _try(lambda: found.update(list_failures(store)))
    failed = [failure for other, failure in found.items() if other != process]
    if not failed:
        return None
    _say_why(failed)
    return common_status(failed)


def common_status(failures: Sequence[Failure]) -> int:
    """Return the exit status of a process that ends because others failed: the largest of their statuses.

    If any status is 2 (wrong usage), the result is 2, so that no supervisor restarts the processes in vain.
    """
    statuses = [failure.status for failure in failures]
    return WRONG_USAGE if WRONG_USAGE in statuses else max(statuses)


def end_with_others(links: Links, timeout: float) -> None:
    """Start threads that end this process some seconds after another process has failed, or at once if it is lost.

    Args:
      links: the connections between the processes, from `rendezvous.meet_all`.
      timeout: the seconds for which a host may be silent.
    """
    store, (count, process) = coordinator_client(), process_count_and_id()
    _closed.clear()
    thread = threading.Thread(target=_watch, args=(store, process, count), name="failures", daemon=True)
    thread.start()
    watch_links(links, timeout, _end_without if process else functools.partial(_report_lost, store))

    def close() -> None:
        # If Python ended while the thread is in a call of JAX's client, the process would be aborted.
        _closed.set()
        thread.join()

    call_before_exit(close)


def part() -> None:
    """Tell the other processes that this process ends now, as its last action after an error.

    Process 0 waits until the others have ended, because JAX aborts processes that use the store when process 0 ends.
    That takes a second if all end at once, about ten seconds if one of them is slow, and three seconds if some do not
    answer.
    """
    _closed.set()
    store, (count, process) = coordinator_client(), process_count_and_id()
    close_links()
    if store is None:
        return
    if process:
        _try(lambda: put_key(store, f"{_PARTING}{process}", "left", overwrite=True))
    else:
        _try(lambda: _wait_until_left(store, count), seconds=_interval(count) + _GRACE + 5.0)


def _watch(store: Any, process: int, count: int) -> None:
    """Check in a loop whether another process failed, and then end this process; runs in a thread of its own."""
    while not _closed.wait(_interval(count)):
        try:
            failed = [failure for other, failure in list_failures(store).items() if other != process]
            if failed:
                put_key(store, f"{_PARTING}{process}", "heard", overwrite=True)
        except RuntimeError:  # process 0 has ended, and the store with it: JAX ends this process
            return
        if failed:
            if not _closed.wait(0.0 if any(failure.silent for failure in failed) else _GRACE):
                _say_why(failed)
                part()
                os._exit(common_status(failed))
            return


def _report_lost(store: Any, lost: Sequence[Loss]) -> None:
    """Report in process 0 that other processes are lost, in their name; a report of their own counts more."""
    for process, name, why, killed in lost:
        _report(store, process, Failure(name, why, TRY_AGAIN, silent=not killed))


def _end_without(lost: Sequence[Loss]) -> None:
    """End this process at once, which has lost process 0: JAX aborts it soon."""
    _say_why([Failure(loss.name, loss.why, TRY_AGAIN) for loss in lost])
    os._exit(TRY_AGAIN)


def _say_why(failed: Sequence[Failure]) -> None:
    status = common_status(failed)
    lines = "".join(f"\n  - {failure.name}: {failure.why}" for failure in failed)
    # Not `print`: the main thread may hold the lock of standard error forever.
    os.write(2, f"jaxshard: this process ends with status {status}, because another one failed{lines}\n".encode())


def _wait_until_left(store: Any, count: int) -> None:
    """Wait, in process 0, until every process that reported "heard" (it knows of the failure) has reported "left"."""
    start = time.monotonic()
    while True:
        states = [state for process, state in list_keys(store, _PARTING).items() if process != "0"]
        answered = len(states) == count - 1 or time.monotonic() - start > _interval(count) + _ANSWER
        if answered and all(state == "left" for state in states):
            break
        time.sleep(0.05)
    time.sleep(_LAST)


def _interval(count: int) -> float:
    # Longer with many processes, so that the store in process 0 is not flooded.
    return _INTERVAL + 0.01 * count


def _try(call: Callable[[], Any], seconds: float | None = None) -> None:
    """Run a call of the key-value store in a thread; return after some seconds even if the call has not returned."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, or has this report already
            call()

    # In a thread, since a call to a dead store blocks for minutes.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_WITHIN if seconds is None else seconds)
