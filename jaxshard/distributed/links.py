"""`watch_links`: find out which process is lost, by a TCP connection between process 0 and every other process.

If a host is cut off or a process killed, all others hang in a collective, until JAX aborts them and names no host. So
the connections of `rendezvous.meet_all` stay open: links. While nothing is sent, the kernels of both hosts test a link
by keepalive packets, also if a process compiles for minutes, holds Python's lock (GIL) or is stopped by a debugger. A
thread of each process looks at its links once a second:

    what the link shows             what it means
    -----------------------------   ------------------------------------------------
    the other kernel answers        the host is up, whatever the process does
    no answer for some seconds      the host is cut off, frozen or without power
    closed, after a "bye"           the process ended on purpose
    closed, without a "bye"         the process was killed

If another process loses process 0, it tries to connect to the other hosts, to say which host is cut off: that of
process 0 or its own. `failures.py` ends the processes.

Only Linux says when the other kernel answered; on other systems only closed links are noticed.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxshard.core.compat import call_before_exit
from jaxshard.distributed.mismatch import list_names

_INTERVAL = 1.0
"""Seconds between two looks at the links."""
_WARN_AFTER = 5.0
"""Seconds without an answer after which a process prints that another host does not answer."""
_REACHED_WITHIN = 2.0
"""Seconds within which a host accepts or refuses a connection, unless it is cut off."""
_ASKED = 3
"""The largest number of other hosts to which a process tries to connect."""
_MISSED = 127
"""Keepalive packets without an answer after which the kernel closes a link: the largest number that Linux accepts."""
_LAST_ANSWER = 56
"""The place of `tcpi_last_ack_recv` in Linux's `struct tcp_info`: 32 bits, the milliseconds since the last answer."""
_BYE = b"."
_LINUX = sys.platform == "linux"

_closed = threading.Event()  # set when this process ends: stop looking at the links
_open: list[socket.socket] = []  # the links of this process


class Other(NamedTuple):
    """Another process.

    Attributes:
      process: the index of the process.
      host: the name of its host.
      address: (IP address, port) of its host, to which a connection is accepted or refused.
    """

    process: int
    host: str
    address: tuple[str, int]

    @property
    def name(self) -> str:
        """Return the name of the process in messages, such as "process 1 (host b)"."""
        return f"process {self.process} (host {self.host})"


class Links(NamedTuple):
    """The connections of a process.

    Attributes:
      open: {connection: the process at its other end}: all others in process 0, and process 0 in all others.
      known: some processes, at least one on each of a few other hosts.
    """

    open: dict[socket.socket, Other]
    known: Sequence[Other]


class Loss(NamedTuple):
    """A process that is lost.

    Attributes:
      process: the index of the process.
      name: the name of the process in messages, such as "process 1 (host b)".
      why: what was noticed, such as "killed".
      killed: True if the process has ended; False if its host does not answer.
    """

    process: int
    name: str
    why: str
    killed: bool


def watch_links(links: Links, timeout: float, lose: Callable[[Sequence[Loss]], None]) -> None:
    """Start a thread that looks at the links of this process until it ends.

    Args:
      links: the connections, from `rendezvous.meet_all`.
      timeout: the seconds for which a host may be silent.
      lose: a function to call in the thread with the processes that are lost.
    """
    _closed.clear()
    for link in links.open:
        _keep_alive(link, timeout)
        _open.append(link)
    _let_coordinator_wait(links, timeout)
    os.register_at_fork(after_in_child=_forget_links)
    thread = threading.Thread(target=_Watch(links, timeout, lose).run, name="links", daemon=True)
    thread.start()

    def close() -> None:
        close_links()
        thread.join()

    call_before_exit(close)


def close_links() -> None:
    """Tell the linked processes that this process ends on purpose, so that they do not take it for killed."""
    for link in _open:
        with contextlib.suppress(OSError):  # the other process has ended
            link.send(_BYE, socket.MSG_DONTWAIT)
    _closed.set()  # now the thread may end, and close the links
    for link in _open:
        with contextlib.suppress(OSError):  # the thread has closed it
            link.shutdown(socket.SHUT_RDWR)  # `close` would not wake the thread


def _forget_links() -> None:
    """Close the links in a process that was forked, such as a loader of data, without an effect on its parent."""
    while _open:
        _open.pop().close()


class _Watch:
    """The thread of `watch_links`."""

    def __init__(self, links: Links, timeout: float, lose: Callable[[Sequence[Loss]], None]):
        self._links, self._known = dict(links.open), links.known
        self._timeout, self._warn_after, self._lose = timeout, min(_WARN_AFTER, timeout / 2), lose
        self._silent: set[Other] = set()

    def run(self) -> None:
        """Look at the links until this process ends."""
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for link in self._links:
                selector.register(link, selectors.EVENT_READ, stack.enter_context(link))
            while True:
                ready: list[socket.socket] = [key.data for key, _ in selector.select(_INTERVAL)]
                if _closed.is_set():
                    return
                for link in ready:
                    selector.unregister(link)
                killed = [self._links[link] for link in ready if not _said_bye(link)]
                self._links = {link: other for link, other in self._links.items() if link not in ready}
                if killed:
                    why = "ended without a word, as if killed"
                    self._lose([Loss(other.process, other.name, why, True) for other in killed])
                self._look_for_silence()

    def _look_for_silence(self) -> None:
        silence = {link: _seconds_since_answer(link) for link in self._links}
        self._warn({self._links[link] for link, seconds in silence.items() if seconds >= self._warn_after})
        longest = max(silence.values(), default=0.0)
        if longest < self._timeout:
            return
        # The kernel tests every link at its own time: take all that became silent together.
        lost = [self._links.pop(link) for link, seconds in silence.items() if seconds > longest - 3 * _INTERVAL]
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - longest))
        why = f"no answer from its host since {since}, for {longest:.0f} s; {self._blame({one.host for one in lost})}"
        self._lose([Loss(other.process, other.name, why, False) for other in lost])

    def _warn(self, silent: set[Other]) -> None:
        """Print which hosts have become silent, and which answer again."""
        for others, what, then in (
            (silent - self._silent, "no answer from", f"; all processes end after {self._timeout:g} s of silence"),
            (self._silent - silent, "an answer again from", ""),
        ):
            if others:
                names = list_names([other.name for other in sorted(others)])
                print(f"jaxshard: {what} the host of {names}{then}", file=sys.stderr, flush=True)
        self._silent = silent

    def _blame(self, silent: set[str]) -> str:
        """Say which host is cut off, as far as this process can find out.

        Args:
          silent: the names of the hosts that do not answer.
        """
        here, hosts = socket.gethostname(), list_names(sorted(silent))
        rest = {other.host: other.address for other in self._known if other.host not in {here, *silent}}
        answers = next((host for host, address in list(rest.items())[:_ASKED] if _answers(address)), None)
        if answers:
            return f"{answers} answers, but not {hosts}: cut off, frozen or without power"
        if len(silent) + len(rest) > 1:
            return f"no other host answers, so this host, {here}, is cut off"
        return f"{hosts} or this host, {here}, is cut off"


def _keep_alive(link: socket.socket, timeout: float) -> None:
    """Let the kernel test a link every second; if the time limit is long, less often."""
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = math.ceil(timeout * 2 / _MISSED)  # the kernel must not close the link before the time limit
    for name, value in {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": _MISSED}.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _let_coordinator_wait(links: Links, timeout: float) -> None:
    """Let the kernel keep the connections of JAX's coordinator, in process 0, although a host is silent for a while.

    The kernel would close them if a packet has no answer for 20 seconds, which can't be set in JAX, and JAX would abort
    the process at the other end. They have the port of the links.
    """
    ports = {link.getsockname()[1] for link, other in links.open.items() if other.process}
    if not (_LINUX and ports):
        return
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed just now
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                address = connection.getsockname()
                if connection.family in (socket.AF_INET, socket.AF_INET6) and address[1] in ports:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(3000 * timeout))


def _seconds_since_answer(link: socket.socket) -> float:
    """Return the seconds since the other kernel has answered on a link; 0 where the system does not say it."""
    if not _LINUX:
        return 0.0
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ANSWER + 4)
    milliseconds: int = struct.unpack_from("=I", info, _LAST_ANSWER)[0]
    return milliseconds / 1000


def _said_bye(link: socket.socket) -> bool:
    """Return True if a link was closed on purpose; False if it was closed by a kernel, or is broken."""
    try:
        return link.recv(len(_BYE)) == _BYE
    except OSError:
        return False


def _answers(address: tuple[str, int]) -> bool:
    """Return True if a host accepts or refuses a connection: it is up, and not cut off from this one."""
    try:
        socket.create_connection(address, _REACHED_WITHIN).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
