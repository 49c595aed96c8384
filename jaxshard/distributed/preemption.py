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

from jaxshard._hosts import Company, everyone, look, put, wait

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
        if preemption.stopped: print(f"told to stop: {preemption.told}")

    Whoever is told leaves a note in JAX's key-value store; then each process says after which step it is and waits, in
    `fit`, for the others to say so: all end after the step that follows the last of these. Looked for once a second by
    a thread; a step costs nothing. A second SIGTERM, two seconds or more after the first, ends the process at once with
    status 143, even if it hangs in a collective. After the context SIGTERM does what it did before; in several
    processes it ends the process, where JAX by itself would ignore it.

    (`jax.experimental.multihost_utils.reached_preemption_sync_point` finds a common step in the same way, but its
    handler swallows every further signal.)

    Raises:
      ValueError: entered in another thread than the main one, which alone may catch signals.
    """

    def __init__(self) -> None:
        self._hosts: Company | None = None
        self._told: str | None = None
        self._stopped = False
        self._first_signal: float | None = None
        self._step, self._posted = -1, False
        self._last: int | None = None
        # Held while the processes find their common step, so that none goes on in the meantime.
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def told(self) -> str | None:
        """Which process got the signal; None as long as none did."""
        return self._told

    @property
    def stopped(self) -> bool:
        """Whether the training was ended for it."""
        return self._stopped

    def __call__(self, step: int, run: Any) -> bool:
        """Whether the training is to end after this step."""
        with self._lock:
            self._step = step
            ends = self._told is not None if self._hosts is None else self._last is not None and step >= self._last
            self._stopped |= ends
            return ends

    def __enter__(self) -> Self:
        self._hosts, self._room = everyone(), f"jaxshard/stop/{next(_rooms)}"
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
        if self._hosts is not None and not self._posted:
            self._post(self._hosts)  # others may be asking just now

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._hosts is None:
            self._told = "this process"

    def _listen(self) -> None:
        """What the thread does: it hears signals even while the main thread waits in a collective."""
        while not self._closed.is_set():
            ready, _, _ = select.select([self._ear], [], [], _LOOK)
            if ready and signal.SIGTERM in self._ear.recv(64):
                self._hear()
            if self._hosts is not None and self._last is None:
                self._settle(self._hosts)

    def _hear(self) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            if self._hosts is None:
                self._told = "this process"
            else:
                self._told = self._hosts.host_of(self._hosts.process)
                put(self._hosts.store, f"{self._room}/told", self._told, overwrite=True)
            print("jaxshard: SIGTERM: ends after the step under way; another one ends at once", file=sys.stderr)
        elif now - self._first_signal >= _SAME:
            os._exit(KILLED)

    def _settle(self, hosts: Company) -> None:
        """Finds the common last step, if any process was told to stop."""
        told = self._told or look(hosts.store, f"{self._room}/told")
        if told is None:
            return
        with self._lock:
            self._told = told
            self._post(hosts)
            steps = []
            for other in hosts.processes:
                while (step := wait(hosts.store, f"{self._room}/after/{other}", _LOOK)) is None:
                    pass  # a process that died ends this one through JAX's heartbeat
                steps.append(int(step))
            self._last = max(steps) + 1

    def _post(self, hosts: Company) -> None:
        put(hosts.store, f"{self._room}/after/{hosts.process}", str(self._step), overwrite=True)
        self._posted = True
