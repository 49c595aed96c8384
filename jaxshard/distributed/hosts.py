"""Collect facts about all hosts for `jaxshard doctor`: names, addresses, clocks, and which hosts can't connect."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from ipaddress import ip_address
from typing import Any, NamedTuple

from jaxshard.core.compat import (
    coordinator_address,
    coordinator_client,
    list_keys,
    process_count_and_id,
    put_key,
)
from jaxshard.distributed.agree import Peers, all_peers

_SECONDS = 5.0
"""Seconds after which a connection to another process counts as failed."""

_ANYWHERE = "192.0.2.1"
"""An address reserved for documentation, for which a host uses its default route."""

_FOLDER = "jaxshard/hosts"


class Host(NamedTuple):
    """A process, and the host that it runs on.

    Attributes:
      process: the index of the process.
      name: the name of the host.
      address: the IP address at which other hosts reach the host.
      clock: seconds by which the host's clock is ahead of the clock of process 0's host, accurate to about a tenth.
      unreached: the indices of processes to which this process could not connect.
      facts: {name: JSON value}, information about the host, from the argument of `survey` in this process.
    """

    process: int
    name: str
    address: str
    clock: float
    unreached: tuple[int, ...]
    facts: dict[str, Any]


def survey(facts: dict[str, Any]) -> list[Host]:
    """Let every process connect to every other process, and collect information about all hosts.

    Every process calls it, after `js.distributed.initialize`. If there is only one process, nothing is connected.

    Args:
      facts: {name: JSON value} with information about this process's host, which all processes receive.

    Returns:
      A `Host` for each process, in order; the same list in every process.
    """
    peers, name = all_peers(), socket.gethostname()
    if peers is None:
        return [Host(0, name, own_address(_ANYWHERE), 0.0, (), facts)]
    store, me = coordinator_client(), process_count_and_id()[1]
    address = common_address(peers, store, me)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        put_key(store, f"{_FOLDER}/address/{me}", f"{address}:{listener.getsockname()[1]}")
        peers.meet("jaxshard doctor: addresses")
        now = time.time()  # `meet` returns at about the same moment in all processes
        others = {int(process): place for process, place in list_keys(store, f"{_FOLDER}/address/").items()}
        unreached = [process for process, place in sorted(others.items()) if not answers(place)]
        put_key(store, f"{_FOLDER}/found/{me}", json.dumps([name, address, now, unreached, facts]))
        peers.meet("jaxshard doctor: connections")
    found = {int(process): json.loads(text) for process, text in list_keys(store, f"{_FOLDER}/found/").items()}
    start = found[0][2]
    return [
        Host(process, name, address, round(now - start, 1), tuple(unreached), facts)
        for process, (name, address, now, unreached, facts) in sorted(found.items())
    ]


def common_address(peers: Peers, store: Any, me: int) -> str:
    """Return the address of this host on the network that it shares with the coordinator.

    The coordinator's host may know its own name by a loopback address, which no other host reaches: its processes then
    take their address on the network of a process that runs elsewhere.
    """
    address = own_address(coordinator_address().rpartition(":")[0].strip("[]"))
    put_key(store, f"{_FOLDER}/interface/{me}", address)
    peers.meet("jaxshard doctor: networks")
    if not ip_address(address).is_loopback:
        return address
    found = list_keys(store, f"{_FOLDER}/interface/").values()
    return next((own_address(other) for other in found if not ip_address(other).is_loopback), address)


def own_address(towards: str) -> str:
    """Return the IP address of this host's network interface for packets to another host.

    A host may have several networks, and no default route.

    Args:
      towards: the name or IP address of the other host.

    Returns:
      The address; the loopback address if there is no route to the other host.
    """
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return "127.0.0.1"
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket sends nothing to connect
            address: str = probe.getsockname()[0]
            return address
    return "127.0.0.1"


def answers(place: str) -> bool:
    """Return True if a program listens at `place`, which is "host:port"."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except OSError:
        return False
    return True
