"""`Watchdog`: end training in all processes if a step takes far too long, and report which process causes the hang.

A process that hangs in a collective prints nothing, and the process that it waits for may be on another host: frozen,
reading from a dead disk, or at an earlier step. So a thread of each process writes a heartbeat once a second, with the
step and the current line of the main thread. A thread that finds a step too long reads the heartbeats of all other
processes, and writes a report. In the key-value store:

    jaxshard/watch/<n>/beat/<p>    the last heartbeat (`Beat`) of process <p>, overwritten every second
    jaxshard/watch/<n>/alarm       the report of the first process that found the hang; all processes print it and end
    jaxshard/watch/<n>/ended/<p>   process <p> has printed its report
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self, TypeVar

import jax

from jaxshard.core.compat import get_key, list_keys, put_key
from jaxshard.distributed.agree import Peers, all_peers
from jaxshard.distributed.links import close_links

HUNG = 75
"""The exit status with which all processes end after a hang: EX_TEMPFAIL of sysexits.h, "try again"."""
_INTERVAL = 1.0
"""Seconds between two heartbeats; longer with hundreds of processes."""
_MISSED = 3
"""Intervals without a new heartbeat after which a process counts as silent."""
_FAREWELL = 10.0
"""Seconds for which an ending process waits until the other processes have printed their reports."""

_rooms = itertools.count()
_JAX = str(Path(jax.__file__).parent)
_waiting: set[CodeType] = set()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def waits_for_devices(fn: _Function) -> _Function:
    """Mark a function that waits for devices, so that the watchdog does not blame this process for a hang.

    Use it as a decorator on functions that call compiled programs or read their results. While the main thread is in an
    unmarked function, its process counts as busy, and so as a possible cause of the hang. Functions of JAX need no
    mark.
    """
    _waiting.add(fn.__code__)
    return fn


class Beat(NamedTuple):
    """A heartbeat of one process, which other processes read to find the cause of a hang.

    Attributes:
      number: the number of earlier heartbeats of the process. If it does not change, the process is silent.
      step: the last finished step; -1 before the first.
      seconds: the seconds since the last finished step, without evaluation and saves.
      paused: True while the process evaluates, saves or does other work outside of steps.
      waits: True if the main thread waits for devices.
      place: the current lines of the main thread, the innermost first.
    """

    number: int
    step: int
    seconds: float
    paused: bool
    waits: bool
    place: str


class Watchdog:
    """A callback that ends all processes if a step of training hangs, and reports which process causes the hang.

    Use it in a `with` block around `js.fit`. The exit status is 75, and the report includes the stacks of all threads:

        with js.distributed.Watchdog() as watchdog:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer, watchdog])

    A step hangs if it takes longer than `factor` times the median of the last hundred steps, and at least `least`
    seconds. The first step, which may compile, has no limit; the second may take `factor * least`. Evaluation, saves
    and other callbacks of `fit` do not count, in this or in any other process. In your own loop, call the watchdog
    after each step and put everything else into a pause:

        watchdog(step, run)
        with watchdog.paused():
            evaluate(run)

    The report, on the standard error of every process, names processes that are silent, at an earlier step, or busy
    with something else while the others wait:

        jaxshard: watchdog: step 21 takes 60 s, more than the limit of 60 s
          held up by process 1 (host b): busy with something else while the others wait
          process 0 (host a): step 20 done 60 s ago, waits for its devices at ...
          process 1 (host b): step 20 done 61 s ago, is busy at data.py:30 read < ...

    Then the process ends by `os._exit`, since the normal exit of Python and JAX would wait for processes that do not
    answer. `jaxshard launch --max-restarts` and most schedulers restart the processes. The watching thread works while
    the main thread hangs in a collective, and issues no collectives itself.

    Args:
      least: the smallest limit for a step, in seconds.
      factor: the limit for a step, as a multiple of the median of the last hundred steps.

    Raises:
      ValueError: `least` is not positive, or `factor` below 1.

    Example:
        with js.distributed.Watchdog(least=120) as watchdog:
            run = js.fit(run, step, batches, steps=1000, on_run=[watchdog])
    """

    def __init__(self, *, least: float = 60.0, factor: float = 10.0):
        if least <= 0 or factor < 1:
            raise ValueError(f"Watchdog: least must be positive and factor at least 1, got {least} and {factor}")
        self._least, self._factor = least, factor
        self._main = threading.get_ident()
        # About the current step, guarded by `_state`: the seconds `_spent` before the last pause, and the time
        # `_started` at which it went on after that pause, None during a pause. Pauses may be nested.
        self._state = threading.Lock()
        self._step = -1
        self._started: float | None = time.monotonic()
        self._spent, self._pauses = 0.0, 0
        self._times: deque[float] = deque(maxlen=100)
        # Used by the thread: the number of its heartbeat, and all heartbeats, when the current step became too long.
        self._first_look: tuple[int, dict[int, Beat]] | None = None
        self._excused = False
        self._closed = threading.Event()

    def __call__(self, step: int, run: Any) -> None:
        """Record a finished step."""
        with self._state:
            if self._step >= 0:  # leave the first step, which compiles, out of the median
                self._times.append(self._elapsed())
            self._step, self._spent = step, 0.0
            self._started = None if self._started is None else time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context for evaluation, saves and the like, whose time does not count as part of the step."""
        with self._state:
            self._spent, self._started, self._pauses = self._elapsed(), None, self._pauses + 1
        try:
            yield
        finally:
            with self._state:
                self._pauses -= 1
                self._started = None if self._pauses else time.monotonic()

    @property
    def limit(self) -> float:
        """Return the seconds that the current step may take; infinite for the first step."""
        if self._step < 0:
            return float("inf")
        if not self._times:
            return self._factor * self._least
        return max(self._least, self._factor * statistics.median(list(self._times)))

    def __enter__(self) -> Self:
        self._peers, self._room = all_peers(), f"jaxshard/watch/{next(_rooms)}"
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        # An error may be caused by the end of another process after its alarm. The thread checks for an alarm a last
        # time; if there is one, this process ends with the report instead of the error.
        self._thread.join()

    def _elapsed(self) -> float:
        return self._spent + (0.0 if self._started is None else time.monotonic() - self._started)

    def _watch(self) -> None:
        """Write heartbeats and look for hangs in a loop; runs in a thread of its own."""
        interval = _INTERVAL + (0.01 * len(self._peers.processes) if self._peers is not None else 0.0)
        for number in itertools.count():
            closed = self._closed.wait(min(interval, self._least / 4))
            beat = self._take_beat(number)
            alarm = self._exchange(beat)
            if beat.paused or beat.seconds <= self.limit:
                self._first_look, self._excused = None, False
            elif alarm is None and not closed:
                alarm = self._find_hang(beat)
            if alarm is not None:
                self._end(alarm)
            if closed or alarm is not None:
                return

    def _take_beat(self, number: int) -> Beat:
        waits, place = locate_thread(self._main)
        with self._state:
            return Beat(number, self._step, self._elapsed(), self._pauses > 0, waits, place)

    def _exchange(self, beat: Beat) -> str | None:
        """Write this process's heartbeat to the key-value store; return the hang report of another process, or None."""
        if self._peers is None:
            return None
        try:
            put_key(self._peers.store, f"{self._room}/beat/{self._peers.process}", json.dumps(beat), overwrite=True)
            return get_key(self._peers.store, f"{self._room}/alarm")
        except RuntimeError as error:  # process 0 has ended, and the store with it: from now on watch only this process
            print(f"jaxshard: watchdog: the other processes can't be reached: {error}", file=sys.stderr, flush=True)
            self._peers = None
            return None

    def _find_hang(self, beat: Beat) -> str | None:
        """Write the report about a step that takes too long to the key-value store, and return it.

        Return None while any process is paused, and until there was enough time to see which processes send no
        heartbeats. The caller then looks again later.
        """
        peers, limit = self._peers, self.limit
        if peers is None:
            return write_report(beat, limit, {0: ("this process", beat)}, [])
        found = list_keys(peers.store, f"{self._room}/beat/")
        beats = {int(process): Beat(*json.loads(text)) for process, text in found.items()}
        if self._first_look is None:
            self._first_look = beat.number, beats
        number, earlier = self._first_look
        if beat.number - number < _MISSED:
            return None
        names = {process: peers.name_of(process) for process in peers.processes}
        if busy := [names[process] for process, other in beats.items() if other.paused]:
            if not self._excused:
                self._excused = True
                text = f"step {beat.step + 1} waits since {beat.seconds:.0f} s for {', '.join(busy)}"
                print(f"jaxshard: watchdog: {text}: evaluates, saves or prints", file=sys.stderr, flush=True)
            return None
        silent = [process for process in names if process not in beats or earlier.get(process) == beats[process]]
        named = {process: (name, beats.get(process)) for process, name in names.items()}
        alarm = write_report(beat, limit, named, silent)
        put_key(peers.store, f"{self._room}/alarm", alarm, overwrite=True)
        return alarm

    def _end(self, alarm: str) -> None:
        """Print the report and the stacks of all threads, and end the process."""
        # Not `print`: the main thread may hold the lock of standard error forever.
        os.write(2, f"{alarm}\njaxshard: watchdog: stacks of this process, which ends with status {HUNG}:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        if self._peers is not None:
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._wait_for_reports(self._peers)
        close_links()
        os._exit(HUNG)

    def _wait_for_reports(self, peers: Peers) -> None:
        """Wait until every process has printed its report, before this process ends.

        The end of one process can make JAX abort the others, which would then print nothing.
        """
        put_key(peers.store, f"{self._room}/ended/{peers.process}", "", overwrite=True)
        end = time.monotonic() + _FAREWELL
        while time.monotonic() < end and len(list_keys(peers.store, f"{self._room}/ended/")) < len(peers.processes):
            time.sleep(0.2)
        if peers.process == peers.processes[0]:
            time.sleep(1.0)  # the store ends with this process, and JAX aborts processes that still use it


def write_report(here: Beat, limit: float, beats: Mapping[int, tuple[str, Beat | None]], silent: Sequence[int]) -> str:
    """Return the text of the report about a hang.

    It says which step hangs and since when, which processes cause the hang, and what each process does.

    Args:
      here: the last heartbeat of this process.
      limit: the time limit of this process's step, in seconds.
      beats: {process index: (name, last heartbeat or None)} of all processes.
      silent: the indices of the processes without a new heartbeat.
    """
    lines = [
        f"jaxshard: watchdog: step {here.step + 1} takes {here.seconds:.0f} s, more than the limit of {limit:.0f} s"
    ]
    if len(beats) > 1:
        lines.append(f"  {name_culprits(beats, silent)}")
    for process, (name, beat) in beats.items():
        if beat is None:
            lines.append(f"  {name}: no sign of life")
        else:
            last = "last heard of: " if process in silent else ""
            doing = "waits for its devices" if beat.waits else "is busy"
            lines.append(f"  {name}: {last}step {beat.step} done {beat.seconds:.0f} s ago, {doing} at {beat.place}")
    return "\n".join(lines)


def name_culprits(beats: Mapping[int, tuple[str, Beat | None]], silent: Sequence[int]) -> str:
    """Return a line for the report that says which processes cause a hang.

    They are the silent processes. If none is silent, they are the processes at an earlier step than others; if all are
    at the same step, the processes that do not wait for devices.

    Args:
      beats: {process index: (name, last heartbeat or None)} of all processes.
      silent: the indices of the processes without a new heartbeat.
    """
    if silent:
        return f"held up by {', '.join(beats[who][0] for who in silent)}: silent (frozen, dead or out of reach)"
    heard = {name: beat for name, beat in beats.values() if beat is not None}
    newest = max(beat.step for beat in heard.values())
    if behind := [name for name, beat in heard.items() if beat.step < newest]:
        return f"held up by {', '.join(behind)}: has not finished step {newest}, which others have"
    busy = [name for name, beat in heard.items() if not beat.waits]
    if busy and len(busy) < len(heard):
        return f"held up by {', '.join(busy)}: busy with something else while the others wait"
    if busy:
        return "no process waits for its devices: all are busy with something else"
    return "all processes wait for their devices: a device or the network between them hangs"


def locate_thread(thread: int) -> tuple[bool, str]:
    """Return (True if a thread waits for devices, its four innermost Python lines as text).

    The thread waits if its innermost Python frame is in JAX, or is a function marked by `waits_for_devices`. The actual
    wait is in C++, which has no Python frame.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False, "(ended)"
    waits = frame.f_code in _waiting or frame.f_code.co_filename.startswith(_JAX)
    places: list[str] = []
    while frame is not None and len(places) < 4:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return waits, " < ".join(places)
