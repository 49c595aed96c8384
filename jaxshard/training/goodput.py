"""Goodput: the wall time of a training run by kind, and its share in steps that count.

A `Ledger` counts while `js.fit` runs. Its `Account` is what a later process goes on with (`goodput_file.py`):

    first process     start | compile | steps 1 to 9 ............ killed
    second process                                    restart .........| compile | steps 5 to 20
                                       steps 5 to 9 become lost steps

This file does not import JAX, for the launcher.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

KINDS = (
    "steps",
    "start",
    "compile",
    "input wait",
    "evaluation",
    "checkpoint wait",
    "callbacks",
    "restart",
    "lost steps",
)
"""The kinds of wall time, as `Goodput` describes them."""

_BETWEEN_MARKS = 1.0
"""Seconds of steps between two marks."""

_MOST_MARKS = 600
"""If there are more marks, every second one is dropped."""


class Goodput(NamedTuple):
    """The wall time of a training run by kind, over all processes that continued it, and the share that was useful.

    Attributes:
      seconds: {kind: wall seconds}. The kinds are
        "steps": in steps whose results the run still has;
        "start": from the start of the first process to `js.fit`, with `js.init`, which compiles (in an interactive
        session from the call on);
        "compile": tracing and compiling the step; for a step that is a plain function, its first call;
        "input wait": waiting for a batch while no device computes;
        "evaluation": in `evaluate`;
        "checkpoint wait": in callbacks that save the run (`js.Checkpointer`), which return when the arrays are copied;
        "callbacks": in all other callbacks;
        "restart": from the last sign of a process that was killed or failed, to the next `js.fit` of the run;
        "lost steps": in steps that were taken again, since the run went back to an earlier step.
        Not counted: the time after a `js.fit` that ended by itself, until the next one.

    Example:
        goodput = js.describe(run, layout, folder="run").goodput
        print(goodput)                    # goodput 91.2% of 0:12:03: restart 41.0 s, compile 12.3 s, ...
        goodput.share, goodput.seconds["restart"]
    """

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """All wall seconds."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of all wall time that was spent in steps that count, from 0 to 1."""
        total = self.total
        return self.seconds["steps"] / total if total else 0.0

    def __str__(self) -> str:
        others = sorted((seconds, kind) for kind, seconds in self.seconds.items() if kind != "steps")
        shown = ", ".join(f"{kind} {seconds:.1f} s" for seconds, kind in reversed(others) if seconds >= 0.05)
        return f"goodput {self.share:.1%} of {clock_str(self.total)}" + (f": {shown}" if shown else "")


def clock_str(seconds: float) -> str:
    """Write a duration in hours, minutes and seconds.

    >>> clock_str(3723.9)
    '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Account(NamedTuple):
    """The state of a ledger, from which a later process can go on.

    Attributes:
      seconds: {kind: wall seconds} until `written`.
      marks: (number of a step, seconds of kind "steps" until its end), ascending; the first is the step before the
        first that was counted, and the last is the newest step.
      written: the time of this state, in seconds since the epoch.
      ended: True if the training ended by itself, not by an exception, a signal or a kill.
    """

    seconds: dict[str, float]
    marks: tuple[tuple[int, float], ...]
    written: float
    ended: bool


class Ledger:
    """A count of the wall seconds of a training by kind. The thread that trains names the kind of what follows.

    Args:
      step: the number of steps that the run has taken.
      past: the account of an earlier process or `fit` that trained the same run; None for a new run.
      age: seconds since the start of this process; 0 if they were counted before, or are no part of the training.
      compiled: how many of the seconds before this call went into compiling the step.
      now: the time in seconds since the epoch.

    Attributes:
      ended: set it to True when training ends by itself.
    """

    def __init__(
        self,
        step: int,
        *,
        past: Account | None = None,
        age: float = 0.0,
        compiled: float = 0.0,
        now: Callable[[], float] = time.time,
    ):
        self.ended = False
        self._now, self._lock = now, threading.Lock()
        self._kind, self._since = "steps", now()
        if past is None or (past.ended and step <= past.marks[0][0]):  # a training from the beginning
            past = Account(dict.fromkeys(KINDS, 0.0), ((step, 0.0),), self._since, True)
        self._seconds, self._marks, self._last = dict(past.seconds), list(past.marks), past.marks[-1]
        before, kind = (age, "start") if past.ended else (max(0.0, self._since - past.written), "restart")
        compiled = min(compiled, before)
        self._seconds[kind] += before - compiled
        self._seconds["compile"] += compiled
        # A process that was killed after its newest step has begun another one, which is lost in any case.
        if step < self._last[0] or (step == self._last[0] and not past.ended):
            self._lose(step)

    def spend(self, kind: str, *, was: str | None = None) -> None:
        """Count the time from now on as `kind`.

        Args:
          kind: one of `KINDS`.
          was: count the time since the last call as this kind, instead of the kind named there.
        """
        with self._lock:
            self._count(was or self._kind)
            self._kind = kind

    def move(self, kind: str, to: str, seconds: float) -> None:
        """Count some of the seconds of one kind as another kind."""
        with self._lock:
            self._count(self._kind)
            seconds = min(seconds, self._seconds[kind])
            self._seconds[kind] -= seconds
            self._seconds[to] += seconds

    def took(self, step: int) -> None:
        """Note that a step has ended, and count the time from now on as that of callbacks."""
        with self._lock:
            self._count(self._kind)
            self._kind = "callbacks"
            self._last = step, self._seconds["steps"]
            if self._last[1] - self._marks[-1][1] >= _BETWEEN_MARKS:
                self._marks.append(self._last)
                if len(self._marks) > _MOST_MARKS:
                    self._marks = [self._marks[0], *self._marks[2::2]]

    def go_back(self, step: int) -> None:
        """Count the steps after `step` as lost, and the time since the last call of `spend` too."""
        with self._lock:
            self._count("lost steps")
            self._lose(step)
            self._kind = "steps"

    def _count(self, kind: str) -> None:
        """Count the time since the last call as `kind`."""
        now = self._now()
        self._seconds[kind] += max(0.0, now - self._since)  # a clock may be set back
        self._since = now

    def _lose(self, step: int) -> None:
        """Count the seconds of the steps after `step` as lost."""
        kept = _interpolate([*self._marks, self._last], step)
        self._seconds["lost steps"] += self._seconds["steps"] - kept
        self._seconds["steps"] = kept
        self._last = step, kept
        self._marks = [*(mark for mark in self._marks if mark[0] < step), self._last]

    @property
    def share(self) -> float:
        """The share of all seconds so far that were spent in steps."""
        with self._lock:
            running = max(0.0, self._now() - self._since)
            steps = self._seconds["steps"] + (running if self._kind == "steps" else 0.0)
            return steps / (sum(self._seconds.values()) + running or 1.0)

    @property
    def goodput(self) -> Goodput:
        """The seconds so far."""
        return Goodput(self.account().seconds)

    def account(self) -> Account:
        """Return the state at this moment; any thread may call this."""
        with self._lock:
            now, seconds = self._now(), dict(self._seconds)
            seconds[self._kind] += max(0.0, now - self._since)  # the current kind may still change
            return Account(seconds, (*self._marks, self._last), now, self.ended)


def _interpolate(marks: list[tuple[int, float]], step: int) -> float:
    """Return the seconds of steps until the end of a step, as a straight line between the marks around it."""
    for (before, least), (after, most) in itertools.pairwise(marks):
        if before <= step < after:
            return least + (most - least) * (step - before) / (after - before)
    return marks[0][1] if step < marks[0][0] else marks[-1][1]
