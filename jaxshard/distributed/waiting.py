"""`Waiting`: print on standard error which processes a process waits for, at growing intervals."""

from __future__ import annotations

import sys
import time

_TELL = 10.0
"""Seconds after which the first line is printed; the pauses between lines double up to a minute."""


class Waiting:
    """A timer for a wait at one point of the program, which says when to print a message about it.

    A message is due after 10, 20, 40 and 80 seconds, and then every minute:

        waiting = Waiting("js.init")
        while not found():
            if waiting.is_due():
                waiting.say("process 1 (host b)")

    prints "jaxshard: js.init: waiting for process 1 (host b) since 10 s".

    Args:
      point: the name of this point of the program.
    """

    def __init__(self, point: str):
        self.point = point
        self._start, self._tell = time.monotonic(), _TELL

    @property
    def seconds(self) -> float:
        """Return the seconds waited so far."""
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        """Return True if it is time to print a message, and schedule the next one."""
        waited = self.seconds
        if waited < self._tell:
            return False
        self._tell = waited + min(60.0, self._tell)
        return True

    def say(self, missing: str) -> None:
        """Print that this process waits for `missing`, such as "process 1 (host b)"."""
        text = f"jaxshard: {self.point}: waiting for {missing} since {self.seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)
