"""Collect facts about all hosts for `jaxshard doctor`: names, addresses, clocks, and which hosts can't connect."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NamedTuple

from jaxshard.core.compat import coordinator_client, list_keys, process_count_and_id, put_key
from jaxshard.distributed.agree import all_peers

_SECONDS = 5.0
"""Seconds after which a connection to another process counts as failed."""

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
    address, name = own_address(), socket.gethostname()
    peers = all_peers()
    if peers is None:
        return [Host(0, name, address, 0.0, (), facts)]
    store, me = coordinator_client(), process_count_and_id()[1]
    with socket.create_server((address, 0)) as listener:
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


def own_address() -> str:
    """Return the IP address of this host's network interface, or the loopback address if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; a datagram socket sends nothing to connect
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def answers(place: str) -> bool:
    """Return True if a program listens at `place`, which is "host:port"."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except OSError:
        return False
    return True
