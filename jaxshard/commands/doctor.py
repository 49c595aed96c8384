"""`jaxshard doctor`: print devices, hosts, versions and the compile cache, what is missing, and what does not work."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console

from jaxshard.checkpoint.memory.folder import find_leftovers, size_of
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
from jaxshard.commands.machine import read_machine
from jaxshard.commands.terminal import facts, start
from jaxshard.core.compat import NEWEST_TESTED, installed_version, process_count_and_id, untested_version
from jaxshard.core.layout import human_bytes
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hosts import Host, survey

_PACKAGES = ("jaxshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_OPTIONAL = {
    "libtpu": "compiling for TPU topologies (extra tpu)",
    "tensorboardX": "jaxshard train --tensorboard (extra viz)",
    "wandb": "jaxshard train --wandb (extra logging)",
    "mlflow": "jaxshard train --mlflow (extra logging)",
    "matplotlib": "pictures (extra viz)",
    "tokenizers": "text for models of Hugging Face (extra hf)",
}

_EXTRAS = ("tpu", "cuda12", "cuda13", "with-cuda", "viz", "logging", "grain", "hf")
"""Extras whose packages have to fit where they are installed."""

_GPU = Path("/dev/nvidia0")
_START_SECONDS = 120


def run(flags: Doctor) -> int:
    """Print what is here, what is missing, and what does not fit together.

    Where several processes were started, as by `jaxshard launch`, they meet, and the first one prints for all.

    Returns:
      1 if something is broken; 0 if nothing is, though extras may be absent.
    """
    from jaxshard.commands.result import write_json

    console = start(flags)
    found = [*_judge_before_start()]
    if problem := start_problem():
        found.append(problem)
        report: dict[str, Any] = {"devices": None, "hosts": []}
    else:
        with usage_errors():
            initialize()
            devices = choose_devices(None)
        report = _describe(devices)
        hosts = survey(report.pop("host"))
        report |= {"processes": len(hosts), "hosts": [host._asdict() for host in hosts]}
        machine = read_machine()
        found += judge_leftovers({folder: size_of(folder) for folder in find_leftovers()})
        found += [*judge_hosts(hosts), *judge_machine(machine, processes=len(hosts), has_gpu=_GPU.exists())]
    report |= {
        "versions": versions(),
        "compile_cache": describe_cache(),
        "missing": missing_packages(report["devices"] is not None and jax.default_backend() == "cpu"),
        "findings": [finding._asdict() for finding in found],
    }
    if process_count_and_id()[1] == 0:
        _print(console, report, found)
        write_json(flags.json, report)
    return int(any(finding.level == "broken" for finding in found))


def _judge_before_start() -> Iterator[Finding]:
    """What can be said before JAX touches a device, which a bad setting would end."""
    machine, chips = read_machine(), [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    yield from judge_settings(os.environ, machine.interfaces, _GPU.exists() or bool(chips))
    yield from judge_packages(installed_version, os.environ)
    if installed_version("libtpu") or chips:
        yield from judge_libtpu(os.environ, LOCK, chips)
    if newer := untested_version():
        yield warning(*newer.rsplit(": ", 1))
    packages = [name for name in ("jaxshard", "jax", "jaxlib", "jax-cuda12-plugin") if installed_version(name)]
    problems = {name: problem for package in packages for name, problem in broken_requirements(package).items()}
    for problem in (problems | wrong_python(packages) | broken_imports()).values():
        what, _, remedy = problem.partition("; ")
        yield broken(what, remedy)


def _describe(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What is said of devices, of all processes, and of this process's host."""
    machine = read_machine()
    memory = [_memory_of(device) for device in devices if device.process_index == jax.process_index()]
    host = {"cores": machine.cores, "memory": machine.memory, "available": machine.available, "shm": machine.shared}
    return {"devices": describe(list(devices)), "device_memory": [one for one in memory if one], "host": host}


def _memory_of(device: jax.Device) -> dict[str, int] | None:
    """The bytes of a device, and those in use; None where it does not say, as a CPU."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    if not stats or "bytes_limit" not in stats:
        return None
    return {"limit": stats["bytes_limit"], "in_use": stats.get("bytes_in_use", 0)}


def _print(console: Console, report: dict[str, Any], found: Sequence[Finding]) -> None:
    """Print the report for people."""
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
    """Describe a host in a line; among several also its clock and whom it reaches."""
    sizes = {"memory": "of memory", "available": "of it free", "shm": "in /dev/shm"}
    known = [f"{human_bytes(host.facts[name])} {what}" for name, what in sizes.items() if host.facts.get(name)]
    if count > 1:
        reached = count - 1 - len(host.unreached)
        known += [f"clock {host.clock:+.1f} s", f"reaches {reached} of {count - 1} others"]
    return ", ".join([f"{host.name} ({host.address})", *known])


def describe_cache() -> dict[str, Any]:
    """Describe JAX's compilation cache: the folder, how many programs are in it, their bytes, and a line of text."""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or not config.jax_enable_compilation_cache:
        why = "JAX_ENABLE_COMPILATION_CACHE is false" if folder else "no folder"
        remedy = "set JAX_COMPILATION_CACHE_DIR=FOLDER, and later starts compile hardly anything"
        return {"folder": None, "programs": 0, "bytes": 0, "text": f"off ({why}); {remedy}"}
    if "://" in folder:
        return {"folder": folder, "programs": None, "bytes": None, "text": f"{folder}; not used on several CPU devices"}
    sizes = [path.stat().st_size for path in Path(folder).rglob("*-cache") if path.is_file()]
    text = f"{folder}, {len(sizes)} programs, {human_bytes(sum(sizes))}; not used on several CPU devices"
    return {"folder": folder, "programs": len(sizes), "bytes": sum(sizes), "text": text}


def missing_packages(is_cpu: bool) -> list[str]:
    """Return a phrase for each package that is absent, with what it is for."""
    missing = [f"{name}, for {use}" for name, use in _OPTIONAL.items() if importlib.util.find_spec(name) is None]
    if is_cpu and _GPU.exists():
        missing.append(f'JAX for the NVIDIA GPU of this machine: pip install "jax[cuda12]=={jax.__version__}"')
    return missing


def start_problem() -> Finding | None:
    """Start JAX in another process where XLA_FLAGS is set, since a flag that XLA lacks ends the process."""
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


def wrong_python(packages: Sequence[str]) -> dict[str, str]:
    """Return a sentence for each package that does not take this Python."""
    mine, problems = platform.python_version(), {}
    for package in packages:
        about = metadata.metadata(package)
        wanted = "".join(about.get_all("Requires-Python", []))
        if wanted and not SpecifierSet(wanted).contains(mine, prereleases=True):
            problems[f"python for {package}"] = f"{package} needs Python {wanted}, this is {mine}; use another Python"
    return problems


def broken_requirements(package: str) -> dict[str, str]:
    """Compare what is installed with what a package requires, and requires in its extras for accelerators and pictures.

    Returns:
      A sentence for each package that is installed in a version that does not fit, or required and not installed. One
      that only an extra requires may be absent.
    """
    problems = {}
    for requirement in map(Requirement, metadata.requires(package) or ()):
        marker, version = requirement.marker, installed_version(requirement.name)
        extra = next((name for name in ("", *_EXTRAS) if marker is None or marker.evaluate({"extra": name})), None)
        if extra is None or (extra and version is None):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            whose = f"{package}[{extra}]" if extra else package
            has = "is not installed" if version is None else f"{version} is installed"
            wanted = f"{requirement.name}{requirement.specifier}"
            problems[requirement.name] = (
                f"{requirement.name} {has}, but {whose} {installed_version(package)} needs {wanted}; "
                f'pip install "{wanted}"'
            )
    return problems


def broken_imports() -> dict[str, str]:
    """Import what every run needs; return a sentence for each module where that fails."""
    problems = {}
    for module in ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint"):
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a package of another version stumbles over
            reason = " ".join(str(error).split())
            problems[module] = f"import {module} fails with {type(error).__name__}: {reason}"
    return problems


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of every package that a result depends on; None for one not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}
