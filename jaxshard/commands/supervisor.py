"""Run a command as several processes of this machine that live and die together.

One thread waits for each process and two copy its output. Python runs signal handlers in the main thread, which must
therefore never block on a process or a pipe: it only reads one queue, where the ends of processes and signals arrive.

    process 0 ── waiter ──── _Ended(0, status) ──┐
    process 1 ── waiter ──── _Ended(1, status) ──┼──> queue ──> main thread (_watch) ──> signals to the processes
    SIGTERM, SIGINT, SIGHUP ─ _Signal(number) ───┘
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
from types import FrameType, MappingProxyType
from typing import IO, Any, NamedTuple

from jaxshard.commands.gloo_lines import GlooFilter
from jaxshard.core.launch_environment import COORDINATOR, INDEX, PROCESSES, RESTARTS

SECONDS_TO_END = 5.0
"""From SIGTERM to SIGKILL for processes whose sibling died; what they compute together can't go on anyway."""

WRONG_USAGE = 2
"""The exit status of a command whose flags are wrong; they would be wrong again after a restart."""

SECONDS_TO_SAY_SO = 2.0
"""From the first end with `WRONG_USAGE` to SIGTERM: the others end by themselves then, each with its own message."""

_SAME_SIGNAL = 2.0
"""Seconds within which two signals count as one, since schedulers signal a job more than once."""

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
"""Program that asks Linux to kill it when its parent dies, however that happens, and then becomes the command.

It is a program of its own and not a `preexec_fn`: Python code between fork and exec can deadlock if the parent has
threads.
"""


class Outcome(NamedTuple):
    """The way in which all processes of a launch ended.

    Attributes:
      status: 0, or the exit status of the process that failed first, which is 128 + n if signal n ended it.
      interrupted: True if a signal to the launcher, such as Ctrl-C, ended the processes.
    """

    status: int
    interrupted: bool


class _Ended(NamedTuple):
    process: int
    status: int


class _Signal(NamedTuple):
    number: int


_Events = SimpleQueue[_Ended | _Signal]

_GIVEN: set[int] = set()
"""Ports that this process gave before: remains of ended processes may still connect to them."""


def run_together(
    command: Sequence[str], *, count: int, restarts: int, grace: float, more: Mapping[str, str] = MappingProxyType({})
) -> Outcome:
    """Run a command in `count` processes at once, until all end with status 0 or one of them fails.

    Environment variables tell each process how to find the others; `js.distributed.initialize` reads them. The output
    of a process is copied line by line to the same stream of the launcher, with the number of the process in front;
    messages of gloo are left out. Each process leads a process group of its own, which is killed when it ends.

    If a process fails, all others get SIGTERM, and `SECONDS_TO_END` later SIGKILL. If it failed with the status for
    wrong flags, SIGTERM is sent `SECONDS_TO_SAY_SO` later, so that the others can print the same error. SIGTERM, SIGINT
    and SIGHUP to the launcher are passed on, and SIGKILL follows `grace` seconds later, or at the second signal. On
    return no process is left running, and the caller's signal handlers are restored. On Linux the processes also die
    with the launcher if it is killed, but not the processes that they have started themselves.

    Args:
      command: the file to run and its arguments.
      count: the number of processes.
      restarts: how many times the processes were started before, which they find in their environment.
      grace: seconds between a signal that was passed on and SIGKILL.
      more: further environment variables for all processes.
    """
    events: _Events = SimpleQueue()
    with _signals_to(events), _reserved_port() as port:
        shared = _environment() | dict(more)
        shared |= {COORDINATOR: f"localhost:{port}", PROCESSES: str(count), RESTARTS: str(restarts)}
        processes: list[_Process] = []
        try:
            for index in range(count):
                processes.append(_Process(index, command, shared | {INDEX: str(index)}, events))
            outcome = _watch(processes, events, grace)
        finally:
            _send_all(processes, signal.SIGKILL)
            for process in processes:
                process.join()
    while not events.empty():  # a signal that came while the last lines were copied
        if isinstance(events.get(), _Signal):
            outcome = outcome._replace(interrupted=True)
    return outcome


def _environment() -> dict[str, str]:
    """Copy the environment for a process: Python's output unbuffered, and no gRPC proxy between local processes."""
    ours = {"PYTHONUNBUFFERED": "1"} | dict(os.environ)
    if any(name in ours for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        direct = ours.get("no_grpc_proxy", ours.get("no_proxy", ""))
        ours["no_grpc_proxy"] = f"{direct},localhost".strip(",")
    return ours


def _watch(processes: Sequence[_Process], events: _Events, grace: float) -> Outcome:
    """Wait for all processes to end; pass signals on, and end the other processes if one fails (see `run_together`)."""
    running, status = set(range(len(processes))), 0
    signaled: float | None = None  # when the first signal was passed on
    due: list[tuple[float, int]] = []  # (time, signal) for the processes that still run
    while running:
        try:
            event = events.get(timeout=max(0.0, due[0][0] - time.monotonic()) if due else None)
        except Empty:
            _, number = due.pop(0)
            _send_all(processes, number)
            continue
        now = time.monotonic()
        if isinstance(event, _Signal):
            if signaled is None:
                signaled, due = now, due[-1:] or [(now + grace, signal.SIGKILL)]
                _send_all(processes, event.number)
            elif now - signaled >= _SAME_SIGNAL:
                _send_all(processes, signal.SIGKILL)
        else:
            running.discard(event.process)
            if event.status and not status:
                status = event.status
                if signaled is None:
                    ending = "; ending the others" if running else ""
                    say(f"process {event.process} {_how_it_ended(event.status)}{ending}")
                    told = now + (SECONDS_TO_SAY_SO if status == WRONG_USAGE else 0.0)
                    due = [(told, signal.SIGTERM), (told + SECONDS_TO_END, signal.SIGKILL)]
    return Outcome(status, interrupted=signaled is not None)


def _how_it_ended(status: int) -> str:
    names = {128 + number: number.name for number in signal.Signals}
    return f"was ended by {names[status]}" if status in names else f"ended with status {status}"


def _send_all(processes: Sequence[_Process], number: int) -> None:
    for process in processes:
        process.send(number)


class _Process:
    """One process of a launch, with threads that copy its output and put its end into the queue of events."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str], events: _Events) -> None:
        self._index, self._events = index, events
        self._lock = threading.Lock()  # between sending a signal and the moment that the number belongs to another
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
            _start_thread(_copy_lines, out, sys.stdout.fileno(), index),
            _start_thread(_copy_lines, err, sys.stderr.fileno(), index),
        ]
        self._waiter = _start_thread(self._wait)

    def send(self, number: int) -> None:
        """Send a signal to the process group, unless the process has ended."""
        with self._lock:
            if self._popen.returncode is None:
                _signal_group(self._popen.pid, number)

    def join(self) -> None:
        """Wait until the process has ended and its output is copied; give up on a pipe that its children keep open."""
        self._waiter.join()
        end = time.monotonic() + SECONDS_TO_END
        for copier in self._copiers:
            copier.join(max(0.0, end - time.monotonic()))

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT leaves a zombie, so that neither its number nor that of its group can become another's.
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        with self._lock:
            _signal_group(self._popen.pid, signal.SIGKILL)
            code = self._popen.wait()
        self._events.put(_Ended(self._index, code if code >= 0 else 128 - code))


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
        os.killpg(leader, number)


def _argv(command: Sequence[str]) -> list[str]:
    """Return the command to start; on Linux a wrapper around it, which ends it if the launcher dies."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]


def _start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


_WRITING = threading.Lock()
"""Held while a line is written, so that lines of several processes do not mix."""


def _copy_lines(source: IO[bytes], target: int, index: int) -> None:
    """Copy lines from a process to the file descriptor `target`, each with the process number in front.

    Gloo's messages about connections are left out. A line is dropped if the reader of `target` is gone.
    """
    without_gloo = GlooFilter()
    with source:
        for line in source:
            kept = without_gloo(line.removesuffix(b"\n"))
            text = b"" if kept is None else b"[%d] %b\n" % (index, kept)
            with _WRITING, contextlib.suppress(OSError):
                while text:
                    text = text[os.write(target, text) :]


def say(text: str) -> None:
    """Print a message of the launcher to standard error."""
    with contextlib.suppress(OSError):
        print(f"jaxshard launch: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Put SIGTERM, SIGINT and SIGHUP into the queue `events`; a signal that is ignored (nohup) stays ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        events.put(_Signal(number))

    with contextlib.ExitStack() as stack:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, handle))
        yield


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a port on which process 0 can listen, reserved so that no other program of this machine gets it.

    A port that an earlier start of the processes used is not used again. The launcher's socket is bound but never
    listens. Process 0 can bind the same port, since Linux allows this to the same user if both sockets have
    SO_REUSEPORT.
    """
    kind, host = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with contextlib.ExitStack() as reserved:
        port = 0
        while not port or port in _GIVEN:  # a port that was given before stays bound here
            one = reserved.enter_context(socket.socket(kind))
            if kind == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if hasattr(socket, "SO_REUSEPORT"):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((host, 0))
            port = one.getsockname()[1]
        _GIVEN.add(port)
        yield port
