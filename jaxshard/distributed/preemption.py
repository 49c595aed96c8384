"""`Preemption`: SIGTERM to any process ends the training of all processes, after the same step.

A signal reaches each process at a different time and step. If each stopped immediately, some would wait forever in the
collectives of a step that others do not run. `CommonStop` chooses a last step for all processes.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

from jaxshard.core.compat import get_key, put_key, wait_for_key
from jaxshard.distributed.agree import Peers, all_peers

KILLED = 143
"""The exit status after a second SIGTERM, as a shell reports it for a process that the signal ended (128 + 15)."""
_POLL = 1.0
"""Seconds between two checks whether another process got a signal."""
_ONE_SIGNAL = 2.0
"""Signals within this many seconds count as one: schedulers signal a process and its launcher, which forwards it."""

_rooms = itertools.count()


class Preemption:
    """A callback that ends `js.fit` in all processes after the same step, once any of them gets SIGTERM.

    The signal is caught inside a `with` block, which every process enters:

        with js.distributed.Preemption() as preemption:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer, preemption])
        if preemption.stopped:
            print(f"stopped after step {int(run.step)}: {preemption.told} got SIGTERM")

    It adds no cost to a step: no collective, no message. A thread of each process checks once a second whether another
    process got the signal; then all processes choose a last step through JAX's key-value store. The training ends one
    or two seconds after the signal, or after the current step if that takes longer. A signal during compilation is told
    at once, too, and the training ends after its first step. If the process is killed before that, no step is lost.

    A second SIGTERM, at least two seconds after the first, ends the process at once with status 143, even while its
    main thread hangs in a collective. After the `with` block the earlier handler of SIGTERM is restored. One exception:
    JAX's own handler, which several processes have and which ignores the signal, is not restored; SIGTERM then ends the
    process.

    A single process can use it in the same way, on any platform and without `js.distributed.initialize`.

    Attributes:
      stopped: True once the training was ended because of a signal.

    Raises:
      ValueError: the `with` block is not in the main thread; Python catches signals only there.

    Example:
        with js.Checkpointer("run", layout, every=100) as checkpointer, js.distributed.Preemption() as preemption:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer, preemption])
    """

    def __init__(self) -> None:
        self._stop: CommonStop | None = None
        self._signalled: float | None = None
        self._has_stepped = self.stopped = False
        self._closed = threading.Event()

    @property
    def told(self) -> str | None:
        """Return the name of the process that got the signal, or None if no process did."""
        if self._stop is not None:
            return self._stop.told
        return None if self._signalled is None else "this process"

    def __call__(self, step: int, run: Any) -> bool:
        """Return True if the training should end after this step, which is the same step in all processes."""
        self._has_stepped = True
        ends = self._signalled is not None if self._stop is None else self._stop.is_last(step)
        self.stopped |= ends
        return ends

    def __enter__(self) -> Self:
        peers, room = all_peers(), f"jaxshard/stop/{next(_rooms)}"
        self._stop = None if peers is None else CommonStop(peers, room)
        # Python runs a signal handler in the main thread between two bytecodes, so never while that thread waits in a
        # collective. But Python writes the signal to the wakeup socket immediately, and the listening thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handler = signal.signal(signal.SIGTERM, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        # None means a handler that was not set from Python: that of JAX, which ignores the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._handler is None else self._handler)
        self._closed.set()
        self._writer.send(b"\0")  # wakes the thread
        self._thread.join()
        self._reader.close()
        self._writer.close()
        if self._stop is not None and kind is None:
            self._stop.announce_step()  # other processes may still look for a common step; this one runs no more

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled is None:
            self._signalled = time.monotonic()

    def _listen(self) -> None:
        """Wait in a loop for SIGTERM, and for requests of other processes to stop; runs in a thread of its own."""
        heard = False
        while not self._closed.is_set():
            ready, _, _ = select.select([self._reader], [], [], _POLL)
            if ready and signal.SIGTERM in self._reader.recv(64):
                if heard and time.monotonic() - (self._signalled or 0.0) >= _ONE_SIGNAL:
                    os._exit(KILLED)
                self._handle(signal.SIGTERM, None)
                if not heard:
                    if self._stop is not None:
                        self._stop.request()
                    end = "the step under way" if self._has_stepped else "the first step, which may still compile"
                    print(f"jaxshard: SIGTERM: ends after {end}; another one ends at once", file=sys.stderr, flush=True)
                heard = True
            if self._stop is not None:
                self._stop.find_last_step()


class CommonStop:
    """A last step that all processes choose together, once any of them got a signal to stop.

    In the key-value store, below the key `room`:

        told        the process that got the signal writes its name
        after/<p>   each process <p>, when it sees `told`, writes the last step it has finished, then waits until all
                    others have written theirs; the last step for all is the largest of these, plus 1

    Example: processes 0 and 1 have finished steps 7 and 8. They write after/0 = 7, after/1 = 8, and stop after step 9.

    Why plus 1: a process may be in the middle of its next step, whose collectives need all processes. No process can be
    further than that step, because a process holds a lock from writing its finished step until the last step is known,
    and `is_last`, which is called after every step, waits for this lock.

    The main thread calls `is_last`; another thread calls `request` and `find_last_step`. That thread can wait for other
    processes even while the main thread hangs in a collective.

    Args:
      peers: all processes.
      room: the beginning of the keys in the store, the same in all processes and different for every `Preemption`.
    """

    def __init__(self, peers: Peers, room: str):
        self.peers, self.room = peers, room
        self.told: str | None = None
        self._finished, self._announced = -1, False
        self._last: int | None = None
        self._lock = threading.Lock()

    def is_last(self, step: int) -> bool:
        """Record a finished step; return True if all processes stop after it."""
        with self._lock:
            self._finished = step
            return self._last is not None and step >= self._last

    def request(self) -> None:
        """Ask all processes to stop."""
        self.told = self.peers.name_of(self.peers.process)
        put_key(self.peers.store, f"{self.room}/told", self.told, overwrite=True)

    def find_last_step(self) -> None:
        """If any process asked to stop, wait for the finished steps of all processes, and choose the last step."""
        if self._last is not None:
            return
        told = self.told or get_key(self.peers.store, f"{self.room}/told")
        if told is None:
            return
        with self._lock:
            self.told = told
            self.announce_step()
            steps = []
            for other in self.peers.processes:
                while (step := wait_for_key(self.peers.store, f"{self.room}/after/{other}", _POLL)) is None:
                    pass  # no time limit: if a process died, `failures.py` ends this one
                steps.append(int(step))
            self._last = max(steps) + 1

    def announce_step(self) -> None:
        """Write the last step that this process has finished, unless it is written already.

        Also called after training has ended, since other processes may wait for it.
        """
        if not self._announced:
            put_key(self.peers.store, f"{self.room}/after/{self.peers.process}", str(self._finished))
            self._announced = True
