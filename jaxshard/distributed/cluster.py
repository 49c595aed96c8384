"""`initialize`: find the other processes that train together, and join them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxshard.core.compat import backend_is_initialized, cluster_processes, place_in_cluster, process_count_and_id
from jaxshard.core.launch_environment import COORDINATOR, INDEX, LIMIT, PROCESSES
from jaxshard.distributed.failures import end_with_others
from jaxshard.distributed.hard_exit import leave_on_error
from jaxshard.distributed.rendezvous import meet_all

_LIMIT = 300
"""The default seconds to wait for all processes."""
SILENCE = "JAXSHARD_HEARTBEAT_TIMEOUT"
"""The environment variable with the seconds for which a host may be silent."""
_SILENCE = 20
"""The default seconds for which a host may be silent: less than the 30 seconds after which gloo gives up."""
_SHORTEST_SILENCE = 3
"""The kernels of two hosts test their connection once a second, and a packet may be lost."""
_MARGIN = 10
"""Seconds that JAX's connections get in addition to `heartbeat_timeout`."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: float | None = None,
    initialization_timeout: int | None = None,
) -> None:
    """Join the processes that train together, so that `jax.devices()` holds the devices of all of them.

    Every process calls it at the top of its program, before anything touches a device. It returns once all processes
    have called it; until then process 0 prints at intervals which processes are missing:

        import jaxshard as js
        js.distributed.initialize()
        mesh = js.make_mesh(data=-1)        # over the devices of all processes

    The number and address of the processes come from the first of these sources that has them:

    - the arguments, all three of them;
    - the environment variables JAXSHARD_COORDINATOR_ADDRESS, JAXSHARD_NUM_PROCESSES and JAXSHARD_PROCESS_ID, which
      `jaxshard launch` sets, and which a script for a cluster may set;
    - the cluster, as JAX detects it: a Slurm step (`srun`), Open MPI's `mpirun`, an indexed Job or a JobSet of
      Kubernetes (with the package `kubernetes`), a Cloud TPU pod.

    If no source has them, or there is only one process, it does nothing, so the same script runs on a laptop. A second
    call does nothing either.

    After this call an uncaught error ends the process at once, after its traceback, with status 1 (2 after a
    `Disagreement`, 75 if a process never came). The other processes end with the same status some seconds later.
    Python's normal exit would wait for the other processes, which wait for this process. `sys.exit(status)` still
    waits: if only one process gives up, raise an error or call `js.distributed.leave(status)`.

    Args:
      coordinator_address: "host:port" of process 0, which listens there. All processes must reach it, and the port must
        be free.
      num_processes: the number of processes.
      process_id: the index of this process, from 0.
      heartbeat_timeout: seconds for which a host may be silent, at least 3; by default those in the environment
        variable JAXSHARD_HEARTBEAT_TIMEOUT, or else 20. After that every process says which host is silent, and ends
        with status 75. On CPUs a collective that waits for another process fails after 30 seconds.
      initialization_timeout: seconds to wait for all processes; by default those in the environment variable
        JAXSHARD_INITIALIZATION_TIMEOUT, or else 300.

    Raises:
      MissingProcess: a process did not come in time; raised in all processes that came.
      Disagreement: two processes have the same index, or different numbers of processes; raised in all processes.
      ValueError: only one or two of the three arguments (or variables) are given, an address is not host:port, the
        index of this process is not below the number of processes, or a number of seconds is too small.
      RuntimeError: JAX has touched a device already, or this process has joined other processes before.
      OSError: process 0 can't listen at its address.

    Example:
        js.distributed.initialize()     # before any other use of JAX; does nothing for a single process
        mesh = js.make_mesh(data=-1)
    """
    limit = math.ceil(_read_seconds("initialization_timeout", initialization_timeout, LIMIT, _LIMIT))
    silence = _read_seconds("heartbeat_timeout", heartbeat_timeout, SILENCE, _SILENCE, _SHORTEST_SILENCE)
    place = _read_place(coordinator_address, num_processes, process_id)
    if jax.distributed.is_initialized():
        _check_same(place)
        leave_on_error()
        return
    # Don't call JAX for a single process: on Slurm it would then use only the first GPU.
    if (place.num_processes if place else cluster_processes()) == 1:
        return
    if backend_is_initialized():
        raise RuntimeError(
            "distributed.initialize: JAX has touched a device already, and joins no other process after that; call it "
            "at the top of the program, before anything creates an array or asks for jax.devices()"
        )
    if place is None:
        address, count, index, devices = place_in_cluster(limit)
        place = _Place(address, count, index, os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"), devices)
    leave_on_error()
    address, bind = place.coordinator_address, place.coordinator_bind_address
    links = meet_all(address, place.num_processes, place.process_id, bind=bind, limit=limit)
    # All processes are there, so JAX needs only a moment. When this limit of its own passes, it aborts the process.
    # JAX must not abort before this process has named a silent host. Its last heartbeat may be half of its time limit
    # ago when a host falls silent, and the next one may come after twice the silence: TCP doubles the pauses.
    heartbeat = math.ceil(4 * (silence + _MARGIN))
    jax.distributed.initialize(**place._asdict(), initialization_timeout=limit, heartbeat_timeout_seconds=heartbeat)
    end_with_others(links, silence)


class _Place(NamedTuple):
    """The coordinator's address, the number of processes and so on: the arguments of `jax.distributed.initialize`."""

    coordinator_address: str
    num_processes: int
    process_id: int
    # If all processes are on this machine, the coordinator need not listen to other hosts.
    coordinator_bind_address: str | None
    local_device_ids: Sequence[int] | None = None
    # Everything is known. JAX would ask the cluster for the rest, and use one device per process on Slurm.
    cluster_detection_method: str = "deactivate"


def _read_place(coordinator: str | None, processes: int | None, index: int | None) -> _Place | None:
    """Read the coordinator's address, the number of processes and this process's index.

    They come from the arguments if any is given, otherwise from the environment variables. Return None without any.
    """
    arguments = {"coordinator_address": coordinator, "num_processes": processes, "process_id": index}
    environment = {name: os.environ.get(name) for name in (COORDINATOR, PROCESSES, INDEX)}
    given = arguments if any(value is not None for value in arguments.values()) else environment
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        there = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(f"distributed.initialize: got {there} without {' and '.join(missing)}; give all three or none")
    names, (address, *numbers) = list(given), map(str, given.values())
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"distributed.initialize: {names[0]}={address} is not host:port, such as node0:8476")
    for name, number in zip(names[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ValueError(f"distributed.initialize: {name}={number} is not a whole number from 0 on")
    count, this = map(int, numbers)
    if this >= count:
        raise ValueError(
            f"distributed.initialize: {names[2]}={this} is none of {names[1]}={count} processes, which are numbered "
            f"from 0 to {count - 1}"
        )
    local = host in ("localhost", "127.0.0.1", "[::1]")
    return _Place(address, count, this, address if local else os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"))


def _read_seconds(argument: str, seconds: float | None, variable: str, default: float, least: float = 0) -> float:
    """Return a number of seconds: the argument if given, otherwise that in the environment variable, or the default."""
    name, value = (argument, seconds) if seconds is not None else (variable, os.environ.get(variable, default))
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not (0 < found < math.inf and found >= least):
        wanted = f"a number of seconds from {least} on" if least else "a positive number of seconds"
        raise ValueError(f"distributed.initialize: {name}={value} is not {wanted}")
    return found


def _check_same(place: _Place | None) -> None:
    """Raise RuntimeError if this process has joined others before, with another index or number of processes."""
    here = process_count_and_id()
    if place is not None and here != (place.num_processes, place.process_id):
        raise RuntimeError(
            f"distributed.initialize: process {place.process_id} of {place.num_processes} was asked for, but this is "
            f"process {here[1]} of {here[0]} already; a process joins the others once"
        )
