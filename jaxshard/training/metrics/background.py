"""`Background`: a writer that sends records to a tracking service in a thread, so that no step waits."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from types import TracebackType
from typing import Literal, Protocol, Self

from jaxshard.core.compat import call_before_exit, process_count_and_id
from jaxshard.training.records import Record

End = Literal["finished", "failed", "killed"]

PATIENCE = 30.0
"""Seconds to wait at the end of training for unsent records."""

MOST_KEPT = 100_000
"""The largest number of records to keep in memory while a service does not answer; later records are lost."""

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
"""The first and the longest delay in seconds after a failure; delays double each time."""


class Tracker(Protocol):
    """The interface of a tracking service. Any method may be called again after it failed."""

    name: str
    """The name for messages, with the address if there is one."""

    def open(self) -> None:
        """Begin or resume the service's run, and record the configuration; raise ValueError for a wrong setting."""

    def send(self, records: list[Record]) -> None:
        """Send records, some of which may have been sent before."""

    def close(self, end: End) -> None:
        """End the service's run; a later `open` resumes it."""


class Background:
    """A writer that sends records to a tracking service in a thread.

    The service's run is opened at once, so that mistakes show before training. Later failures are warnings: records are
    kept and sent again. `js.fit` calls `finish`; a loop of your own calls it, or uses the writer as a context.

    Args:
      tracker: the service.
      patience: seconds that `finish` waits.

    Raises:
      ValueError: from `tracker.open`.
    """

    def __init__(self, tracker: Tracker, *, patience: float = PATIENCE) -> None:
        self._tracker, self._patience = tracker, patience
        self._pending: deque[Record] = deque()
        self._changed = threading.Condition()
        self._hurry, self._give_up = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._end: End | None = None
        self._problem: Exception | None = None
        self._is_told = self._is_open = False
        self._lost = 0
        self._writes = process_count_and_id()[1] == 0
        if self._writes:
            self._open_at_once()
            call_before_exit(self.finish)

    def __call__(self, record: Record) -> None:
        """Queue a record and return at once."""
        if not self._writes:
            return
        with self._changed:
            if len(self._pending) < MOST_KEPT:
                self._pending.append(record)
            else:
                self._lost += 1
            self._changed.notify()
        if self._thread is None:
            self._start()
        self._tell()

    def finish(self, error: BaseException | None = None) -> None:
        """Send the remaining records, end the service's run, and warn of records that could not be sent.

        Args:
          error: the exception that ended the training, or None.
        """
        if self._thread is None:
            if not self._is_open:
                return
            self._start()
        thread = self._thread
        assert thread is not None
        with self._changed:
            self._end = "finished" if error is None else "failed" if isinstance(error, Exception) else "killed"
            self._changed.notify()
        self._hurry.set()
        thread.join(self._patience)
        with self._changed:
            self._give_up.set()
            unsent = len(self._pending) + self._lost
            self._pending.clear()
        is_late, self._thread, self._is_open, self._lost = thread.is_alive(), None, False, 0
        if unsent or is_late:
            why = f"it did not answer within {self._patience:g} s" if self._problem is None else _words(self._problem)
            left = f"{unsent} records were not sent" if unsent else "the run was not ended"
            warnings.warn(f"{self._tracker.name}: {left}: {why}", RuntimeWarning, stacklevel=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(error)

    def _open_at_once(self) -> None:
        """Open the service's run in the caller's thread, where a service may ask for a password."""
        try:
            self._tracker.open()
        except (ValueError, ImportError):
            raise
        except Exception as error:  # a service may raise anything: the training goes on without it
            self._problem = error
            self._start()
            self._tell()
        else:
            self._is_open = True

    def _start(self) -> None:
        self._end = None
        self._hurry, self._give_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(self._give_up,), name="metrics", daemon=True)
        self._thread.start()

    def _work(self, given_up: threading.Event) -> None:
        """Send records, in the thread, until `finish` is called; retry after failures, and once more at the end."""
        delay, is_last_try = _FIRST_DELAY, False
        while not given_up.is_set():
            with self._changed:
                self._changed.wait_for(lambda: not self._is_open or self._pending or self._end is not None)
                records, end = list(self._pending), self._end
            try:
                if not self._is_open:
                    self._tracker.open()
                    self._is_open = True
                if records:
                    self._tracker.send(records)
                    with self._changed:
                        if given_up.is_set():
                            return
                        for _ in records:
                            self._pending.popleft()
                elif end is not None:
                    self._tracker.close(end)
                    return
                delay, self._problem, self._is_told = _FIRST_DELAY, None, False
            except Exception as error:  # a service may raise anything
                self._problem = error
                if is_last_try:
                    return
                is_last_try = end is not None
                (given_up if is_last_try else self._hurry).wait(_FIRST_DELAY if is_last_try else delay)
                delay = min(2 * delay, _LONGEST_DELAY)

    def _tell(self) -> None:
        """Warn once, in the caller's thread, if the service failed."""
        problem = self._problem
        if problem is not None and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{self._tracker.name}: {_words(problem)}. The training goes on; its records are kept and sent later",
                RuntimeWarning,
                stacklevel=3,
            )


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
