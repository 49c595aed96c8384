"""Runs a command as several processes of this machine that live and die together.

One thread waits for each process and two copy its output, so that the main thread, where signals arrive, never blocks
on either: all of them report to one queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, NamedTuple

from jaxshard.distributed.cluster import COORDINATOR, INDEX, PROCESSES, RESTARTS

SECONDS_TO_END = 5.0
"""After SIGTERM, for those whose sibling died: what they compute together can't go on anyway."""

_SAME = 2.0
"""Seconds in which two signals count as one: schedulers signal a job more than once."""

_FORWARDED = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGHUP"))

_WRAPPER = """
import ctypes, os, signal, sys
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)  # what Python itself changed, and a program would inherit
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)  # it died before
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks Linux to kill this process when its parent dies, however that happens, and becomes the command.

In a process of its own, since Python code between fork and exec can deadlock where the parent has threads.
"""


class Outcome(NamedTuple):
    """How the processes ended: the status of the first that failed (128 + n for signal n), and if we were told to."""

    status: int
    interrupted: bool


class _Ended(NamedTuple):
    process: int
    status: int


class _Signal(NamedTuple):
    number: int


_Events = SimpleQueue[_Ended | _Signal]


def run_together(command: Sequence[str], *, count: int, restarts: int, grace: float) -> Outcome:
    """Runs a command, whose first word is a file, `count` times at once, until all ended with 0 or one did not.

    None is left running. Each process finds the others by its environment (`js.distributed.initialize`), leads its own
    process group, which ends with it, and has its lines of output copied with its number in front, to the stream that
    they were written to. Where one fails, all others get SIGTERM, and SIGKILL `SECONDS_TO_END` later. SIGTERM, SIGINT
    and SIGHUP are passed on, and SIGKILL follows `grace` seconds later, or at the second of these signals. Signals are
    the caller's again on return. On Linux the processes die with this one even where it is killed; what they started
    themselves does not.
    """
    events: _Events = SimpleQueue()
    with _signals_to(events), _reserved_port() as port:
        shared = _environment() | {COORDINATOR: f"localhost:{port}", PROCESSES: str(count), RESTARTS: str(restarts)}
        group = _Group()
        try:
            for index in range(count):
                group.add(_Process(index, command, shared | {INDEX: str(index)}, events))
            outcome = _watch(group, events, grace)
        finally:
            group.send(signal.SIGKILL)
            group.join()
    while not events.empty():  # a signal that came while the last lines were copied
        if isinstance(events.get(), _Signal):
            outcome = outcome._replace(interrupted=True)
    return outcome


def _environment() -> dict[str, str]:
    """Ours, with lines that come at once, and without a proxy between processes of this machine."""
    ours = {"PYTHONUNBUFFERED": "1"} | dict(os.environ)
    if any(name in ours for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        direct = ours.get("no_grpc_proxy", ours.get("no_proxy", ""))
        ours["no_grpc_proxy"] = f"{direct},localhost".strip(",")
    return ours


def _watch(group: _Group, events: _Events, grace: float) -> Outcome:
    """The outcome, once all processes have ended."""
    status = 0
    told: float | None = None
    deadline: float | None = None
    while group.running:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            group.send(signal.SIGKILL)
            deadline = None
            continue
        if isinstance(event, _Signal):
            now = time.monotonic()
            if told is None:
                told, deadline = now, deadline or now + grace
                group.send(event.number)
            elif now - told >= _SAME:
                group.send(signal.SIGKILL)
        else:
            group.running.discard(event.process)
            if event.status and not status:
                status = event.status
                if told is None:
                    say(f"process {event.process} {_how(event.status)}" + "; ending the others" * bool(group.running))
                    group.send(signal.SIGTERM)
                    deadline = time.monotonic() + SECONDS_TO_END
    return Outcome(status, interrupted=told is not None)


def _how(status: int) -> str:
    """How a process ended, from its exit status."""
    names = {128 + number: number.name for number in signal.Signals}
    return f"was ended by {names[status]}" if status in names else f"ended with status {status}"


class _Group:
    """All processes of an attempt."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self.running: set[int] = set()

    def add(self, process: _Process) -> None:
        self._processes.append(process)
        self.running.add(process.index)

    def send(self, number: int) -> None:
        for process in self._processes:
            process.send(number)

    def join(self) -> None:
        for process in self._processes:
            process.join()


class _Process:
    """One process, the threads that copy its output, and the one that reports its end."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str], events: _Events) -> None:
        self.index = index
        self._events = events
        self._lock = threading.Lock()  # between sending a signal and the moment that the number belongs to another
        self._reaped = False
        self._popen = subprocess.Popen(
            _argv(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        out, err = self._popen.stdout, self._popen.stderr
        assert out is not None and err is not None
        self._copiers = [
            _thread(lambda: _copy(out, sys.stdout.fileno(), index)),
            _thread(lambda: _copy(err, sys.stderr.fileno(), index)),
        ]
        self._waiter = _thread(self._wait)

    def send(self, number: int) -> None:
        """A signal to the process and what it started, unless it has ended."""
        with self._lock:
            if not self._reaped:
                _signal_group(self._popen.pid, number)

    def join(self) -> None:
        """Returns when it has ended and its output is copied, up to a pipe that somebody else holds open."""
        self._waiter.join()
        end = time.monotonic() + SECONDS_TO_END
        for copier in self._copiers:
            copier.join(max(0.0, end - time.monotonic()))

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # While it is a zombie, its number and its group can't be another's.
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        with self._lock:
            _signal_group(self._popen.pid, signal.SIGKILL)
            code = self._popen.wait()
            self._reaped = True
        self._events.put(_Ended(self.index, code if code >= 0 else 128 - code))


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
        os.killpg(leader, number)


def _argv(command: Sequence[str]) -> list[str]:
    """What to start: the command itself, on Linux by way of the wrapper."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]


def _thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


_WRITING = threading.Lock()


def _copy(source: IO[bytes], target: int, index: int) -> None:
    """Whole lines, each with the number of its process in front; what can't be written (nobody reads on) is dropped."""
    with source:
        for line in source:
            text = b"[%d] " % index + line.removesuffix(b"\n") + b"\n"
            with _WRITING, contextlib.suppress(OSError):
                while text:
                    text = text[os.write(target, text) :]


def say(text: str) -> None:
    """A line of our own."""
    with contextlib.suppress(OSError):
        print(f"jaxshard launch: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Signals become events; one that was ignored when we were started (nohup) stays ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        events.put(_Signal(number))

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else on this machine gets while process 0 may listen on it.

    The socket never listens; process 0 binds the same port, which Linux allows to the same user where both ask for it.
    """
    kind, host = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(kind) as reserved:
        if kind == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if hasattr(socket, "SO_REUSEPORT"):
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, 0))
        yield reserved.getsockname()[1]
