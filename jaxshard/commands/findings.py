"""Known bad combinations of packages, settings and hosts, each with its remedy, for `jaxshard doctor`.

Every function takes the facts as arguments and yields `Finding`s, so that tests can try any environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxshard.commands.cuda import PLUGINS
from jaxshard.commands.machine import Machine
from jaxshard.core.layout import human_bytes
from jaxshard.cost.hardware import gpu_memory_fraction
from jaxshard.distributed.hosts import Host

_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu", "METAL", "oneapi", "neuron")
"""Names that JAX and its public plugins have for platforms."""

_LEAST_SHARED = 256 * 2**20
_LEAST_FILES = 1024
_MOST_CLOCK = 5.0
LOCK = Path("/tmp/libtpu_lockfile")
"""The file by which libtpu lets one process at a time use the chips."""


class Finding(NamedTuple):
    """A problem, or a possible problem, of this machine.

    Attributes:
      level: "broken" if it stops every run, "warning" if it stops or slows some runs.
      what: the problem, with the value that was found.
      remedy: what to do.
    """

    level: Literal["broken", "warning"]
    what: str
    remedy: str


def broken(what: str, remedy: str) -> Finding:
    """Make the `Finding` of a problem that stops every run."""
    return Finding("broken", what, remedy)


def warning(what: str, remedy: str) -> Finding:
    """Make the `Finding` of a problem that stops or slows some runs."""
    return Finding("warning", what, remedy)


def judge_settings(environ: Mapping[str, str], interfaces: Sequence[str], has_accelerator: bool) -> Iterator[Finding]:
    """Yield problems of the environment variables of JAX, XLA, Gloo and NCCL.

    Args:
      environ: the environment variables.
      interfaces: the names of this host's network interfaces.
      has_accelerator: True if the machine has a GPU or TPU, even if JAX does not use it.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    unknown = [name for name in platforms.split(",") if name and name not in _PLATFORMS]
    if unknown:
        yield broken(f"JAX_PLATFORMS={platforms}: JAX has no platform {unknown[0]!r}", "set it to cpu, cuda or tpu")
    elif platforms == "cpu" and has_accelerator:
        yield warning("JAX_PLATFORMS=cpu hides the accelerator of this machine", "unset JAX_PLATFORMS")
    flags = environ.get("XLA_FLAGS", "").split()
    for flag in flags:
        if flag.startswith("--xla_tpu_"):
            yield broken(
                f"XLA_FLAGS has {flag}, which only libtpu knows: XLA ends the process", "move it to LIBTPU_INIT_ARGS"
            )
        elif not flag.startswith("--"):
            yield broken(f"XLA_FLAGS has {flag!r}, which is no flag", "begin each with -- and part by blanks")
    count = environ.get("JAX_NUM_CPU_DEVICES")
    if count is not None and any("host_platform_device_count" in flag for flag in flags):
        yield broken(
            f"JAX_NUM_CPU_DEVICES={count} beside --xla_force_host_platform_device_count in XLA_FLAGS",
            "unset one of them",
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environ.get(name, "").lstrip("^=")
        if interfaces and wanted and not any(one.startswith(part) for part in wanted.split(",") for one in interfaces):
            yield broken(f"{name}={environ[name]}: there is no such network interface", f"use {', '.join(interfaces)}")
    try:
        gpu_memory_fraction(environ)
    except ValueError as error:
        yield broken(*str(error).split("; "))


def judge_packages(installed: Callable[[str], str | None], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield conflicts of packages that pip does not notice, such as two CUDA plugins of JAX.

    Args:
      installed: a function that returns the installed version of a package, or None.
      environ: environment variables.
    """
    plugins = [name for name in PLUGINS.values() if installed(name)]
    if len(plugins) > 1:
        yield broken(f"{' and '.join(plugins)} are both installed; JAX starts only one", f"pip uninstall {plugins[0]}")
    for plugin in plugins:
        if (version := installed(plugin)) != (jaxlib := installed("jaxlib")):
            yield broken(
                f"{plugin} {version} beside jaxlib {jaxlib}: the GPU is not found, or the process crashes",
                f'pip install "{plugin}=={jaxlib}"',
            )
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    shadows = [folder for folder in folders if _has_cuda(folder)]
    if plugins and shadows:
        yield warning(
            f"LD_LIBRARY_PATH has {shadows[0]}, whose CUDA libraries are loaded in the place of JAX's own",
            "unset LD_LIBRARY_PATH",
        )


def judge_machine(machine: Machine, *, processes: int, has_gpu: bool) -> Iterator[Finding]:
    """Yield limits of a host (shared memory, open files, free memory) that are too low for `processes` processes."""
    together = processes > 1 or has_gpu
    if machine.shared is not None and machine.shared < _LEAST_SHARED and together:
        yield warning(
            f"/dev/shm has {human_bytes(machine.shared)}, through which processes and GPUs of a host talk",
            "give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes",
        )
    if machine.open_files is not None and 0 <= machine.open_files < _LEAST_FILES:
        yield warning(
            f"a process may open {machine.open_files} files; a checkpoint of many arrays needs more", "ulimit -n 65536"
        )
    if machine.own_name_is_loopback and processes > 1:
        yield warning(
            "the name of this host stands for an address 127.x in /etc/hosts, which other hosts can't reach",
            "remove that line, or set GLOO_SOCKET_IFNAME to the interface that leads to the others",
        )
    if machine.available is not None and machine.memory is not None and machine.available < machine.memory // 20:
        yield warning(
            f"{human_bytes(machine.available)} of the host's {human_bytes(machine.memory)} are free",
            "end what holds the memory; compilation and checkpoints need some",
        )


def judge_leftovers(folders: Mapping[Path, int]) -> Iterator[Finding]:
    """Yield folders in memory (/dev/shm) that a killed `jaxshard launch` has left; `folders` has their bytes."""
    for folder, size in folders.items():
        yield warning(
            f"{folder} holds {human_bytes(size)} of memory for a run whose launcher was killed",
            "delete it; the next jaxshard launch --max-restarts on this host does so too",
        )


def judge_hosts(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Yield hosts that can't connect to another host, and hosts whose clock differs from that of process 0."""
    for host in hosts:
        who = f"process {host.process} on {host.name}"
        if host.unreached:
            others = ", ".join(f"process {number} on {hosts[number].name}" for number in host.unreached)
            yield broken(f"{who} reaches no port of {others}", "open the firewall between the hosts for all TCP ports")
        if abs(host.clock) > _MOST_CLOCK:
            yield warning(
                f"the clock of {who} is {host.clock:+.1f} s off that of process 0", "run an NTP client on every host"
            )


def judge_libtpu(environ: Mapping[str, str], lock: Path, chips: Sequence[Path]) -> Iterator[Finding]:
    """Yield other processes that have loaded libtpu or use the TPU chips, which one process alone may do.

    Args:
      environ: environment variables.
      lock: the lock file of libtpu.
      chips: the device files of TPU chips, such as /dev/accel0.
    """
    if environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD", "") not in ("", "0", "false"):
        return
    if lock.exists() and not os.access(lock, os.W_OK):
        yield warning(f"{lock} belongs to another user, so libtpu does not start", f"sudo rm {lock}")
    elif lock.exists() and _is_locked(lock):
        yield warning(
            f"another process has loaded libtpu and holds {lock}",
            "end it; or, to compile for chips that are not here, set ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        )
    users = {pid for chip in chips for pid in users_of(chip)} - {os.getpid()}
    if users:
        yield warning(
            f"the TPU chips are in use by process {', '.join(map(str, sorted(users)))}",
            "end it: chips belong to one process at a time",
        )


def users_of(file: Path) -> list[int]:
    """Return the ids of the processes that have a file open; processes of other users may be invisible."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(link) == str(file) for link in folder.iterdir()):
                found.append(int(folder.parent.name))
    return found


def _has_cuda(folder: str) -> bool:
    return any(True for name in ("libcudnn*", "libcublas*", "libcudart*") for _ in Path(folder).glob(name))


def _is_locked(file: Path) -> bool:
    """Return True if another process has locked a file."""
    try:
        import fcntl
    except ImportError:  # Windows, which has no libtpu
        return False
    with file.open("r+") as opened:
        for lock in (fcntl.flock, fcntl.lockf):  # Linux has two kinds, which do not see each other
            try:
                lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            lock(opened, fcntl.LOCK_UN)
    return False
