"""`Preemption`: SIGTERM to one process ends the training of all of them, after the same step."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from jaxshard.distributed.agree import Peers, all_peers
from jaxshard.distributed.key_value import get_key, put_key, wait_for_key

KILLED = 143
"""The exit status after a second SIGTERM: what a shell says of a process that the signal ended."""
_LOOK = 1.0
"""Seconds between two looks for what the other processes were told."""
_SAME = 2.0
"""Seconds in which two signals count as one: schedulers signal a process, and its launcher passes theirs on."""

_rooms = itertools.count()


class Preemption:
    """Ends `fit` after a step that is the same in all processes, once one of them got SIGTERM.

    A callback of `js.fit`, and a context in which the signal is caught; every process enters it:

        with js.distributed.Preemption() as preemption:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer, preemption])
            checkpointer.save(run)

    Then `preemption.stopped` says whether the training was ended, and `preemption.told` which process got the signal.

    Looked for by a thread once a second; a step costs nothing. A second SIGTERM, two seconds or more after the first,
    ends the process at once with status 143, even if it hangs in a collective. After the context SIGTERM does what it
    did before; in several processes it ends the process, where JAX by itself would ignore it.

    (`jax.experimental.multihost_utils.reached_preemption_sync_point` finds a common step in the same way as `Stop`,
    but its handler swallows every further signal.)

    Raises:
      ValueError: entered in another thread than the main one, which alone may catch signals.
    """

    def __init__(self) -> None:
        self._stop: Stop | None = None
        self._signalled: float | None = None
        self._stopped = False
        self._closed = threading.Event()

    @property
    def told(self) -> str | None:
        """Which process got the signal; None as long as none did."""
        if self._stop is not None:
            return self._stop.told
        return None if self._signalled is None else "this process"

    @property
    def stopped(self) -> bool:
        """Whether the training was ended for it."""
        return self._stopped

    def __call__(self, step: int, run: Any) -> bool:
        """Whether the training is to end after this step."""
        ends = self._signalled is not None if self._stop is None else self._stop.after(step)
        self._stopped |= ends
        return ends

    def __enter__(self) -> Self:
        peers, room = all_peers(), f"jaxshard/stop/{next(_rooms)}"
        self._stop = None if peers is None else Stop(peers, room)
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._handler = signal.signal(signal.SIGTERM, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        # None is a handler that was not set from Python: JAX's own, which swallows the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._handler is None else self._handler)
        self._closed.set()
        self._mouth.send(b"\0")
        self._thread.join()
        self._ear.close()
        self._mouth.close()
        if self._stop is not None and error is None:
            self._stop.leave()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, which comes late where the main thread waits in a collective: the thread listens too."""
        if self._signalled is None:
            self._signalled = time.monotonic()

    def _listen(self) -> None:
        """What the thread does."""
        heard = False
        while not self._closed.is_set():
            ready, _, _ = select.select([self._ear], [], [], _LOOK)
            if ready and signal.SIGTERM in self._ear.recv(64):
                if heard and time.monotonic() - (self._signalled or 0.0) >= _SAME:
                    os._exit(KILLED)
                self._handle(signal.SIGTERM, None)
                if not heard and self._stop is not None:
                    self._stop.tell()
                if not heard:
                    text = "jaxshard: SIGTERM: ends after the step under way; another one ends at once"
                    print(text, file=sys.stderr, flush=True)
                heard = True
            if self._stop is not None:
                self._stop.settle()


class Stop:
    """The step after which all processes stop, once one of them is told to.

    That one leaves a note. Whoever sees it says after which step it is and goes no further before all others have said
    so: all stop after the step that follows the last of these. `after` belongs to the main thread, `tell` and `settle`
    to one that works while the main thread waits in a collective for a process that is at an earlier step.
    """

    def __init__(self, peers: Peers, room: str):
        self.peers, self.room = peers, room
        self.told: str | None = None
        self._step, self._posted = -1, False
        self._last: int | None = None
        self._lock = threading.Lock()

    def after(self, step: int) -> bool:
        """Whether all stop after this step."""
        with self._lock:
            self._step = step
            return self._last is not None and step >= self._last

    def tell(self) -> None:
        """Tells all processes that this one is to stop."""
        self.told = self.peers.name_of(self.peers.process)
        put_key(self.peers.store, f"{self.room}/told", self.told, overwrite=True)

    def settle(self) -> None:
        """Finds the common step, if any process is to stop; waits for the others."""
        if self._last is not None:
            return
        told = self.told or get_key(self.peers.store, f"{self.room}/told")
        if told is None:
            return
        with self._lock:
            self.told = told
            self.leave()
            steps = []
            for other in self.peers.processes:
                while (step := wait_for_key(self.peers.store, f"{self.room}/after/{other}", _LOOK)) is None:
                    pass  # a process that died ends this one through JAX's heartbeat
                steps.append(int(step))
            self._last = max(steps) + 1

    def leave(self) -> None:
        """Says after which step this process is: the others ask only once, and not whether it has ended."""
        if not self._posted:
            put_key(self.peers.store, f"{self.room}/after/{self.peers.process}", str(self._step))
            self._posted = True
