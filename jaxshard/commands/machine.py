"""`Machine`: the memory, limits and network of this host, as `jaxshard doctor` prints and judges them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

_SHARED = Path("/dev/shm")
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much memory a container may have, in its second and its first version."""


class Machine(NamedTuple):
    """The memory, limits and network of a host; None for what the system does not tell.

    Attributes:
      cores: the number of cores that this process may use.
      memory: bytes of memory that this process may use; the limit of a container counts.
      available: bytes of this memory that are free.
      shared: bytes of the file system /dev/shm.
      open_files: the number of files that the process may have open at once.
      interfaces: the names of the network interfaces.
      own_name_is_loopback: True if the host's own name resolves to 127.x, which other hosts can't reach.
    """

    cores: int
    memory: int | None
    available: int | None
    shared: int | None
    open_files: int | None
    interfaces: tuple[str, ...]
    own_name_is_loopback: bool


def read_machine() -> Machine:
    """Read the memory, limits and network of this host."""
    memory, available = _read_memory()
    shared = shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    interfaces = tuple(name for _, name in socket.if_nameindex()) if hasattr(socket, "if_nameindex") else ()
    return Machine(cores, memory, available, shared, _read_open_files(), interfaces, _own_name_is_loopback())


def _read_memory() -> tuple[int | None, int | None]:
    """Return (bytes of memory, free bytes) from /proc/meminfo and the limits of a container; None if unknown."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = 1024 * int(rest.split()[0])
    memory, available = found.get("MemTotal"), found.get("MemAvailable")
    for file in _GROUPS:
        with contextlib.suppress(OSError, ValueError):
            limit = int(file.read_text())
            if memory is not None and limit < memory:
                memory, available = limit, min(limit, available or limit)
    return memory, available


def _read_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _own_name_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False
