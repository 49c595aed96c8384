"""`meet_all`: wait until all processes have started before JAX joins them, and name the missing processes.

`jax.distributed.initialize` prints nothing while it waits, can't be interrupted, and aborts all processes if one does
not start. So before it is called, process 0 listens on the coordinator's port, and all others connect to process 0.
Messages are lines of JSON:

    process 0                          processes 1, 2, ...
    ---------------------------------  -------------------------------------------------------------------------
    listen on the port                 connect; retry every second until process 0 listens
                                  <--  {"process": 1, "processes": 4, "host": "b", "limit": 300, "waited": 7}
    wait until all are connected
    ["go", "", known]             -->  wait for the outcome
    close the port                     go on to jax.distributed.initialize, on the same port

"known" is [[process, host, [IP address, port]], ...] for process 0 and one process on each of a few other hosts. The
connections stay open, so that the processes notice if one is lost (`links.py`).

In place of "go" the outcome is "missing" if a waiting process reaches its time limit, or "differ" if two processes have
the same index or expect different numbers of processes; all processes then raise the same error. A process whose
connection ends before the outcome counts as missing, and may connect again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxshard.core.launch_environment import LIMIT
from jaxshard.distributed.agree import Disagreement
from jaxshard.distributed.failures import MissingProcess
from jaxshard.distributed.links import Links, Other
from jaxshard.distributed.mismatch import list_names
from jaxshard.distributed.waiting import Waiting

_POINT = "distributed.initialize"
_PAUSE = 1.0
"""Seconds between two attempts to connect to process 0, or to listen."""
_LONGEST = 4096
"""The largest message of a process in bytes; a connection that sends more is from another program, and is closed."""
_TOLD = 4
"""The number of hosts that a process is told of, to find out which host is cut off if process 0 does not answer."""
_MARGIN = 10.0
"""Seconds for which other processes wait beyond the limit, so that process 0, which knows the missing, ends first."""


class Arrival(NamedTuple):
    """The message that a process sends when it connects to process 0.

    Attributes:
      process: the index of the process.
      processes: the number of processes that it expects.
      host: the name of the host of the process.
      limit: the seconds for which the process waits for all others, from its own start.
      waited: how many of these seconds have passed.
    """

    process: int
    processes: int
    host: str
    limit: float
    waited: float

    @property
    def name(self) -> str:
        """Return the name of the process in error messages, such as "process 1 (host b)"."""
        return f"process {self.process} (host {self.host})"


class _Guest(NamedTuple):
    """Another process that is connected to process 0, the time (`time.monotonic`) until which it waits, its address."""

    arrival: Arrival
    end: float
    address: tuple[str, int]


def meet_all(address: str, processes: int, process: int, *, bind: str | None, limit: float) -> Links:
    """Wait until all processes have called this, and print at intervals which processes are missing.

    Args:
      address: host:port of process 0.
      processes: the number of processes.
      process: the index of this process.
      bind: host:port on which process 0 listens; None for the port of `address` on all network interfaces.
      limit: the seconds to wait.

    Returns:
      The connections between process 0 and all others, which are open.

    Raises:
      MissingProcess: a process did not connect in time.
      Disagreement: two processes have the same index, or expect different numbers of processes.
      OSError: process 0 can't listen at the address.
    """
    me = Arrival(process, processes, socket.gethostname(), limit, 0.0)
    if process == 0:
        outcome, text, links = _Host(me).collect(bind or f"[::]:{address.rpartition(':')[2]}")
    else:
        outcome, text, links = _visit(address, me)
    if outcome == "differ":
        raise Disagreement(text)
    if outcome != "go":
        raise MissingProcess(text)
    return links


class _Host:
    """Process 0 in `meet_all`: it listens on a port, to which all other processes connect."""

    def __init__(self, me: Arrival):
        self._me, self._waiting = me, Waiting(_POINT)
        self._end = time.monotonic() + me.limit
        self._received: dict[socket.socket, bytes] = {}  # of every connection, other programs included
        self._guests: dict[socket.socket, _Guest] = {}
        self._ended: dict[int, str] = {}  # the hosts of processes that came and ended
        self._difference: str | None = None

    def collect(self, bind: str) -> tuple[str, str, Links]:
        """Wait for all other processes, send them the outcome, and return it: (outcome, error message or "", links).

        The outcome is "go", "missing" (a process did not come in time) or "differ" (two processes don't fit together).
        After "go" the connections to the other processes stay open.
        """
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(self._listen(bind))
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._close)
            selector.register(listener, selectors.EVENT_READ)
            while (outcome := self._outcome()) is None:
                if self._waiting.is_due():
                    self._waiting.say(self._missing())
                for key, _ in selector.select(_PAUSE):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is listener:
                        self._accept(listener, selector)
                    elif not self._read(key.fileobj):
                        selector.unregister(key.fileobj)
                        self._drop(key.fileobj)
            links = self._links() if outcome[0] == "go" else Links({}, [])
            hosts = {other.host: other for other in links.known if other.host != self._me.host}
            known = [Other(0, self._me.host, ("", 0)), *list(hosts.values())[:_TOLD]]
            line = json.dumps([*outcome, known]).encode() + b"\n"
            for connection in self._received:
                with contextlib.suppress(OSError):  # the process has just ended
                    connection.settimeout(_MARGIN)
                    connection.sendall(line)
            for connection in links.open:
                self._received.pop(connection)
        return *outcome, links

    def _links(self) -> Links:
        links = {
            connection: Other(guest.arrival.process, guest.arrival.host, guest.address)
            for connection, guest in self._guests.items()
        }
        return Links(links, list(links.values()))

    def _close(self) -> None:
        for connection in self._received:
            connection.close()

    def _listen(self, bind: str) -> socket.socket:
        """Listen on the port of `bind`; if another program uses the port, try again until the time limit."""
        while (listener := _try_to_listen(bind)) is None:
            if time.monotonic() > self._end:
                raise MissingProcess(f"{_POINT}: another program has used the port of {bind} for {self._me.limit:g} s")
            if self._waiting.is_due():
                self._waiting.say(f"the port of {bind}, which another program uses,")
            time.sleep(_PAUSE)
        return listener

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # the connection is closed already
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._received[connection] = b""
            selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> bool:
        """Read from a connection; return False if it must be closed, because it ended or another program opened it."""
        try:
            data, address = connection.recv(_LONGEST), connection.getpeername()[:2]
        except OSError:
            return False
        if connection in self._guests or not data:
            return bool(data)
        self._received[connection] += data
        line, newline, _ = self._received[connection].partition(b"\n")
        if not newline:
            return len(line) <= _LONGEST
        arrival = _parse_arrival(line)
        if arrival is None:
            return False
        self._difference = self._difference or self._compare(arrival)
        # Clocks of hosts differ, so a process sends how long it has waited, not when it started.
        self._guests[connection] = _Guest(arrival, time.monotonic() + arrival.limit - arrival.waited, address)
        self._ended.pop(arrival.process, None)
        return True

    def _compare(self, arrival: Arrival) -> str | None:
        """Return an error message if a process expects another number of processes, or has another process's index.

        Return None if neither is the case.
        """
        here = [self._me, *(guest.arrival for guest in self._guests.values())]
        if arrival.processes != self._me.processes:
            told = f"{arrival.name} was told of {arrival.processes} processes, {self._me.name} of {self._me.processes}"
            return f"{told}; tell all of the same"
        if same := [other for other in here if other.process == arrival.process]:
            return f"{same[0].name} and another one on host {arrival.host} have one number; give each its own"
        return None

    def _drop(self, connection: socket.socket) -> None:
        guest = self._guests.pop(connection, None)
        if guest is not None:
            self._ended[guest.arrival.process] = guest.arrival.host
        self._received.pop(connection)
        connection.close()

    def _outcome(self) -> tuple[str, str] | None:
        """Return (outcome, error message), as in `collect`; None if processes are missing and no time limit is over."""
        if self._difference is not None:
            return "differ", f"{_POINT}: the processes differ: {self._difference}"
        if len(self._guests) == self._me.processes - 1:
            return "go", ""
        waiting = {self._me: self._end} | {guest.arrival: guest.end for guest in self._guests.values()}
        first = min(waiting, key=waiting.__getitem__)
        if time.monotonic() < waiting[first]:
            return None
        return "missing", _missed(self._missing(), "did not come", first.limit, sorted(waiting))

    def _missing(self) -> str:
        """Return the names of the missing processes, for messages."""
        here = {guest.arrival.process for guest in self._guests.values()}
        names = [
            f"process {number}" + (f" (host {self._ended[number]}, it came and ended)" if number in self._ended else "")
            for number in range(1, self._me.processes)
            if number not in here
        ]
        return f"{list_names(names)} of {self._me.processes}"


def _visit(address: str, me: Arrival) -> tuple[str, str, Links]:
    """Connect to process 0, from any other process, and wait for its outcome.

    Returns:
      (outcome, error message or "", the connection to process 0, which is open after "go").
    """
    host, _, port = address.rpartition(":")
    place, waiting = (host.strip("[]"), int(port)), Waiting(_POINT)
    while True:
        left = max(1.0, me.limit - waiting.seconds)
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection(place, timeout=min(5.0, left)))
                connection.sendall(json.dumps(me._replace(waited=waiting.seconds)._asdict()).encode() + b"\n")
                connection.settimeout(left + _MARGIN)
                outcome, text, known = json.loads(_read_line(connection))
                first, *others = [Other(process, host, (ip, port)) for process, host, (ip, port) in known]
                if outcome == "go":
                    stack.pop_all()  # the connection stays open
                return str(outcome), str(text), Links({connection: first}, others)
        except (OSError, ValueError, TypeError) as error:  # no process 0, it has ended, or it is another program
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if waiting.seconds >= me.limit:
            what = f"did not answer at {address} ({why})"
            return "missing", _missed(f"process 0 of {me.processes}", what, me.limit, [me]), Links({}, [])
        if waiting.is_due():
            waiting.say(f"process 0 of {me.processes}, which does not answer at {address} ({why}),")
        time.sleep(_PAUSE)


def _missed(missing: str, what: str, limit: float, here: Sequence[Arrival]) -> str:
    """Return the error message of a `MissingProcess`: "{missing} {what} within {limit} s; {names in here} waited"."""
    return (
        f"{_POINT}: {missing} {what} within {limit:g} s; {list_names([one.name for one in here])} waited. See what "
        f"became of it, or wait longer: initialization_timeout, or {LIMIT} in the environment"
    )


def _parse_arrival(line: bytes) -> Arrival | None:
    """Decode the message of a process; return None if the text was sent by another program."""
    try:
        found = json.loads(line)
        process, processes = int(found["process"]), int(found["processes"])
        limit, waited = float(found["limit"]), float(found["waited"])
        arrival = Arrival(process, processes, str(found["host"])[:256], limit, waited)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return arrival if 0 <= process < processes and limit > 0 and waited >= 0 else None


def _read_line(connection: socket.socket) -> bytes:
    """Read a line from a connection; raise OSError if the connection ends before the end of the line."""
    received = b""
    while not received.endswith(b"\n"):
        data = connection.recv(_LONGEST)
        if not data or len(received) > 10 * _LONGEST:
            raise ConnectionError("it hung up")
        received += data
    return received


def _try_to_listen(bind: str) -> socket.socket | None:
    """Listen on host:port; return None if another program listens there.

    Raises:
      OSError: no address of the host can be used.
    """
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    # With SO_REUSEPORT, which JAX's service sets, Linux lets two programs of a user share a port. Then processes of one
    # run could connect to another run, so first check that no program answers.
    with contextlib.suppress(OSError):
        probe = socket.create_connection((host.replace("::", "localhost"), int(port)), timeout=1.0)
        with probe:
            if probe.getsockname() != probe.getpeername():  # on a free port a socket can connect to itself
                return None
    # On a host without IPv6, "all interfaces" is 0.0.0.0.
    places = [
        place for name in ([host, "0.0.0.0"] if host == "::" else [host]) for place in _addresses(name, int(port))
    ]
    problem = OSError(errno.EADDRNOTAVAIL, f"{_POINT}: {bind} is no address of this host")
    for family, place in places:
        listener = socket.socket(family)
        try:
            # The launcher reserves the port by a socket that is bound but does not listen, so share the port with it.
            for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
                if hasattr(socket, option):
                    listener.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listener.bind(place)
            listener.listen(4096)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            problem = OSError(error.errno, f"{_POINT}: can't listen on {bind}: {error.strerror}")
        else:
            return listener
    raise problem


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Resolve a host name; return (address family, socket address) of each address, [] if there is none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return []
    return [(family, place) for family, _, _, _, place in found]
