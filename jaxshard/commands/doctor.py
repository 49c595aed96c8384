"""`jaxshard doctor`: print devices, hosts, versions and the compilation cache, and problems with their remedies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxshard.checkpoint.memory.folder import find_leftovers, size_of
from jaxshard.commands.cuda import GPU, PLUGINS, missing_plugin
from jaxshard.commands.devices import choose_devices, describe
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.findings import (
    LOCK,
    Finding,
    broken,
    judge_hosts,
    judge_leftovers,
    judge_libtpu,
    judge_machine,
    judge_packages,
    judge_settings,
    warning,
)
from jaxshard.commands.flags import Doctor
from jaxshard.commands.json_object import write_json
from jaxshard.commands.machine import Machine, read_machine
from jaxshard.commands.packages import judge_imports, judge_versions, missing_packages, versions
from jaxshard.commands.terminal import facts, start
from jaxshard.core.compat import NEWEST_TESTED, process_count_and_id, untested_version
from jaxshard.core.installed import installed_version
from jaxshard.core.layout import human_bytes
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hosts import Host, survey

_START_SECONDS = 120


def run(flags: Doctor) -> int:
    """Run `jaxshard doctor`: print devices, hosts, versions and problems.

    If several processes run it, as under `jaxshard launch`, they exchange their findings and process 0 prints them.

    Returns:
      The exit status: 1 if a problem stops every run; else 0, also if optional packages are missing.
    """
    console, machine, missing = start(flags), read_machine(), missing_packages()
    found = [*_judge_before_start(machine)]
    report: dict[str, Any] = {"devices": None, "hosts": []}
    devices: list[jax.Device] = []
    if problem := start_problem():
        found.append(problem)
    else:
        with usage_errors():
            initialize()
            devices = choose_devices(None)
        own = [device for device in devices if device.process_index == jax.process_index()]
        hosts = survey(
            {"cores": machine.cores, "memory": machine.memory, "available": machine.available, "shm": machine.shared}
        )
        report = {"devices": describe(devices), "device_memory": [one for one in map(_memory_of, own) if one]}
        report |= {"processes": len(hosts), "hosts": [host._asdict() for host in hosts]}
        found += judge_leftovers({folder: size_of(folder) for folder in find_leftovers()})
        found += [*judge_hosts(hosts), *judge_machine(machine, processes=len(hosts), has_gpu=GPU.exists())]
        if plugin := missing_plugin():
            missing.append(f'JAX for the NVIDIA GPU of this machine: pip install "{plugin}"')
    report |= {"versions": versions(), "compile_cache": describe_cache(devices), "missing": missing}
    report |= {"findings": [finding._asdict() for finding in found]}
    if process_count_and_id()[1] == 0:
        _print(console, report, found)
        write_json(flags.json, report)
    return int(any(finding.level == "broken" for finding in found))


def _judge_before_start(machine: Machine) -> Iterator[Finding]:
    """Find problems of settings, packages and libtpu, before JAX starts a backend: some would crash the start."""
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    yield from judge_settings(os.environ, machine.interfaces, GPU.exists() or bool(chips))
    yield from judge_packages(installed_version, os.environ)
    if installed_version("libtpu") or chips:
        yield from judge_libtpu(os.environ, LOCK, chips)
    if newer := untested_version():
        yield warning(*newer.rsplit(": ", 1))
    yield from judge_versions(
        [name for name in ("jaxshard", "jax", "jaxlib", *PLUGINS.values()) if installed_version(name)]
    )
    yield from judge_imports()


def _memory_of(device: jax.Device) -> dict[str, int] | None:
    """Return {"limit", "in_use"}, the bytes of a device's memory; None if the device does not tell, as on CPUs."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    if not stats or "bytes_limit" not in stats:
        return None
    return {"limit": stats["bytes_limit"], "in_use": stats.get("bytes_in_use", 0)}


def _print(console: Console, report: dict[str, Any], found: Sequence[Finding]) -> None:
    hosts = [Host(**host) for host in report["hosts"]]
    facts(console, {"devices": report["devices"] or "not started"})
    if memory := report.get("device_memory"):
        limit, used = (max(one[name] for one in memory) for name in ("limit", "in_use"))
        facts(console, {"memory": f"{human_bytes(limit)} per device, {human_bytes(used)} in use"})
    if hosts:
        facts(console, {"processes": str(len(hosts)), "cores": str(hosts[0].facts["cores"])})
    for host in hosts:
        facts(console, {"host" if len(hosts) == 1 else f"host {host.process}": describe_host(host, len(hosts))})
    facts(console, {"cache": report["compile_cache"]["text"]})
    console.print()
    facts(console, {name: version or "not installed" for name, version in report["versions"].items()})
    facts(console, {"tested": f"with JAX up to {'.'.join(map(str, NEWEST_TESTED))}"})
    console.print()
    console.print("missing: " + ("; ".join(report["missing"]) or "nothing"))
    for finding in sorted(found, key=lambda finding: finding.level, reverse=True):
        console.print(f"{finding.level}: {finding.what}" + (f"; {finding.remedy}" if finding.remedy else ""))


def describe_host(host: Host, count: int) -> str:
    """Describe one of `count` hosts in a line; if there are several, also its clock and how many others it reaches."""
    sizes = {"memory": "of memory", "available": "of it free", "shm": "in /dev/shm"}
    known = [f"{human_bytes(host.facts[name])} {what}" for name, what in sizes.items() if host.facts.get(name)]
    if count > 1:
        reached = count - 1 - len(host.unreached)
        known += [f"clock {host.clock:+.1f} s", f"reaches {reached} of {count - 1} others"]
    return ", ".join([f"{host.name} ({host.address})", *known])


def describe_cache(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Describe JAX's compilation cache: {"folder", "programs", "bytes", "text"}; "text" is a line to print.

    Args:
      devices: the devices of this run; none if JAX did not start.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or not config.jax_enable_compilation_cache:
        why = "JAX_ENABLE_COMPILATION_CACHE is false" if folder else "no folder"
        remedy = "set JAX_COMPILATION_CACHE_DIR=FOLDER, and later starts compile hardly anything"
        if not _uses_cache(devices):
            remedy = "it is not used on CPU devices of several processes"
        return {"folder": None, "programs": 0, "bytes": 0, "text": f"off ({why}); {remedy}"}
    local = "://" not in folder
    sizes = [path.stat().st_size for path in Path(folder).rglob("*-cache") if path.is_file()] if local else []
    held = f", {len(sizes)} programs, {human_bytes(sum(sizes))}" if local else ""
    found = {"folder": folder, "programs": len(sizes) if local else None, "bytes": sum(sizes) if local else None}
    unused = "" if _uses_cache(devices) else "; not used on CPU devices of several processes"
    return found | {"text": f"{folder}{held}{unused}"}


def _uses_cache(devices: Sequence[jax.Device]) -> bool:
    return not devices or devices[0].platform != "cpu" or len({device.process_index for device in devices}) == 1


def start_problem() -> Finding | None:
    """Try to start JAX in a child process if XLA_FLAGS is set: an unknown flag would crash this process."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    if not flags:
        return None
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return broken(f"JAX does not start within {_START_SECONDS} s", "unset XLA_FLAGS to see whether it is that")
    if found.returncode == 0:
        return None
    said = next((line for line in found.stderr.splitlines() if "XLA_FLAGS" in line), found.stderr.strip()[-200:])
    return broken(f"JAX does not start: {said.rpartition('] ')[2]}", "take that flag out of XLA_FLAGS")
