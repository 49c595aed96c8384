"""`Watchdog`: a step that takes far too long is reported, with the process that holds it up, and ends the run."""

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
from types import CodeType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax

from jaxshard.distributed.agree import Peers, all_peers
from jaxshard.distributed.key_value import get_key, list_keys, put_key

HUNG = 75
"""The exit status of a process whose run hung: EX_TEMPFAIL, "try again"."""
_BEAT = 1.0
"""Seconds between two signs of life; more with hundreds of processes."""
_HEARD = 3
"""Signs of life to wait for before a process counts as silent."""
_FAREWELL = 10.0
"""Seconds in which every process is to write its report before the first of them ends."""

_rooms = itertools.count()
_JAX = str(Path(jax.__file__).parent)
_waiting: set[CodeType] = set()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def waits_for_devices(fn: _Function) -> _Function:
    """Marks a function as one that waits for devices, and with them for other processes: hang reports say so.

    Code of JAX itself is known to wait; this is for ours that calls compiled programs or reads their results.
    """
    _waiting.add(fn.__code__)
    return fn


class Beat(NamedTuple):
    """A sign of life.

    Attributes:
      number: which one of its process, from 0.
      step: the last step that was finished; -1 before the first.
      seconds: since then, evaluation and saves left out.
      paused: whether it evaluates, saves or does something else that is no step.
      waits: whether it waits for its devices.
      place: where its main thread stands.
    """

    number: int
    step: int
    seconds: float
    paused: bool
    waits: bool
    place: str


class Watchdog:
    """Ends a run that hangs: exit status 75 in every process, after a report of who holds it up, and all stacks.

    A callback of `js.fit`, and a context around it:

        with js.distributed.Watchdog() as watchdog:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer, watchdog])

    A step hangs when it takes longer than `factor` times the median of the last hundred steps, and at least `least`
    seconds. The first step, which may compile, takes as long as it takes; the second may take `factor * least`.
    Evaluation, saves and other callbacks of `fit` don't count, nor does the time in which any process is busy with
    them; in a loop of your own they go into `with watchdog.paused():`.

    A thread of each process leaves a sign of life per second in JAX's key-value store: its step, and where its main
    thread stands. It works while that is blocked in a collective. Whoever finds a hanging step first tells the others;
    the report on standard error names the processes that are silent, a step behind, or busy with something else while
    the others wait. Then `os._exit`: Python's and JAX's normal end would wait for processes that do not answer.
    """

    def __init__(self, *, least: float = 60.0, factor: float = 10.0):
        if least <= 0 or factor < 1:
            raise ValueError(f"Watchdog: least must be positive and factor at least 1, got {least} and {factor}")
        self._least, self._factor = least, factor
        self._times: deque[float] = deque(maxlen=100)
        self._step = -1
        self._started: float | None = time.monotonic()
        self._spent, self._pauses = 0.0, 0
        self._main, self._state = threading.get_ident(), threading.Lock()
        self._closed = threading.Event()
        self._alarmed = threading.Event()
        self._before: tuple[int, dict[int, Beat]] | None = None
        self._excused = False

    def __call__(self, step: int, run: Any) -> None:
        """Takes note of a finished step."""
        with self._state:
            if self._step >= 0:
                self._times.append(self._elapsed())
            self._step, self._spent = step, 0.0
            self._started = None if self._started is None else time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time belongs to no step."""
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
        """Seconds that the present step may take."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        # An error on the way out may come from the end of another process: this one, too, ends by its report.
        if self._alarmed.is_set() or self._peers is not None:
            self._thread.join()

    def _elapsed(self) -> float:
        return self._spent + (0.0 if self._started is None else time.monotonic() - self._started)

    def _watch(self) -> None:
        """What the thread does."""
        pause = _BEAT + (0.01 * len(self._peers.processes) if self._peers is not None else 0.0)
        for number in itertools.count():
            closed = self._closed.wait(min(pause, self._least / 4))
            beat = self._beat(number)
            alarm = self._exchange(beat)
            if beat.paused or beat.seconds <= self.limit:
                self._before, self._excused = None, False
            elif alarm is None and not closed:
                alarm = self._accuse(beat)
            if alarm is not None:
                self._alarmed.set()
                self._end(alarm)
            if closed or alarm is not None:
                return

    def _beat(self, number: int) -> Beat:
        waits, place = where(self._main)
        with self._state:
            return Beat(number, self._step, self._elapsed(), self._pauses > 0, waits, place)

    def _exchange(self, beat: Beat) -> str | None:
        """Leaves a sign of life, and returns another process's alarm."""
        if self._peers is None:
            return None
        try:
            put_key(self._peers.store, f"{self._room}/beat/{self._peers.process}", json.dumps(beat), overwrite=True)
            return get_key(self._peers.store, f"{self._room}/alarm")
        except RuntimeError as error:  # the first process is gone, and with it the store
            print(f"jaxshard: watchdog: the other processes can't be reached: {error}", file=sys.stderr, flush=True)
            self._peers = None
            return None

    def _accuse(self, beat: Beat) -> str | None:
        """The alarm, told to all; None where a process is busy with what is no step, or not heard long enough."""
        peers, limit = self._peers, self.limit
        if peers is None:
            return report(beat, limit, {0: ("this process", beat)}, [])
        beats = self._beats(peers)
        if self._before is None:
            self._before = beat.number, beats
        if beat.number - self._before[0] < _HEARD:
            return None
        names = {process: peers.name_of(process) for process in peers.processes}
        if busy := [names[process] for process, other in beats.items() if other.paused]:
            if not self._excused:
                self._excused = True
                text = f"step {beat.step + 1} waits since {beat.seconds:.0f} s for {', '.join(busy)}"
                print(f"jaxshard: watchdog: {text}: evaluates, saves or prints", file=sys.stderr, flush=True)
            return None
        silent = [who for who, name in names.items() if who not in beats or self._before[1].get(who) == beats[who]]
        alarm = report(beat, limit, {who: (name, beats.get(who)) for who, name in names.items()}, silent)
        put_key(peers.store, f"{self._room}/alarm", alarm, overwrite=True)
        return alarm

    def _beats(self, peers: Peers) -> dict[int, Beat]:
        found = list_keys(peers.store, f"{self._room}/beat/")
        return {int(process): Beat(*json.loads(text)) for process, text in found.items()}

    def _end(self, alarm: str) -> None:
        os.write(2, f"{alarm}\njaxshard: watchdog: stacks of this process, which ends with status {HUNG}:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        if self._peers is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._take_leave(self._peers)
        os._exit(HUNG)

    def _take_leave(self, peers: Peers) -> None:
        """Waits until every process has reported: the end of one is an error, or worse, in the others."""
        put_key(peers.store, f"{self._room}/ended/{peers.process}", "", overwrite=True)
        end = time.monotonic() + _FAREWELL
        while time.monotonic() < end:
            if len(list_keys(peers.store, f"{self._room}/ended/")) == len(peers.processes):
                break
            time.sleep(0.2)
        if peers.process == peers.processes[0]:
            time.sleep(1.0)  # the store ends with this process, and JAX aborts those that still use it


def report(here: Beat, limit: float, beats: Mapping[int, tuple[str, Beat | None]], silent: Sequence[int]) -> str:
    """What hangs here, for how long, who holds it up, and a line per process: its name and its last sign of life."""
    head = f"step {here.step + 1} takes {here.seconds:.0f} s, more than the limit of {limit:.0f} s"
    lines = [f"jaxshard: watchdog: {head}"]
    lines += [f"  {guilty(beats, silent)}"] if len(beats) > 1 else []
    for who, (name, beat) in beats.items():
        if beat is None:
            lines.append(f"  {name}: no sign of life")
        else:
            last = "last heard of: " if who in silent else ""
            doing = "waits for its devices" if beat.waits else "is busy"
            lines.append(f"  {name}: {last}step {beat.step} done {beat.seconds:.0f} s ago, {doing} at {beat.place}")
    return "\n".join(lines)


def guilty(beats: Mapping[int, tuple[str, Beat | None]], silent: Sequence[int]) -> str:
    """Which processes hold the others up, and how one can tell."""
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


def where(thread: int) -> tuple[bool, str]:
    """(whether a thread waits for its devices, the innermost lines of Python that it stands in)."""
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
