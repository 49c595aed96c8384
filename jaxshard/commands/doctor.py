"""`jaxshard doctor`: print devices and versions, and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

import jax
from packaging.requirements import Requirement

from jaxshard.commands.devices import choose_devices, describe
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.terminal import facts, make_console
from jaxshard.core.compat import NEWEST_TESTED, installed_version, untested_version

_PACKAGES = ("jaxshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_OPTIONAL = {
    "libtpu": "compiling for TPU topologies (extra tpu)",
    "tensorboardX": "jaxshard train --tensorboard (extra viz)",
    "matplotlib": "pictures (extra viz)",
    "tokenizers": "text for models of Hugging Face (extra hf)",
}

_EXTRAS = ("tpu", "cuda12", "cuda13", "with-cuda", "viz", "grain", "hf", "images")
"""Extras whose packages have to fit where they are installed."""


def run() -> int:
    """Print devices and versions, what is missing, and what does not fit together.

    Returns:
      1 if something is broken; 0 if nothing is, though extras may be absent.
    """
    console = make_console(stderr=False)
    with usage_errors():
        devices = choose_devices(None)
    facts(console, {"devices": describe(devices), "processes": str(jax.process_count()), "cores": str(os.cpu_count())})
    console.print()
    facts(console, {name: version or "not installed" for name, version in versions().items()})
    facts(console, {"tested": f"with JAX up to {'.'.join(map(str, NEWEST_TESTED))}"})
    console.print()
    missing = [f"{name}, for {use}" for name, use in _OPTIONAL.items() if importlib.util.find_spec(name) is None]
    if devices[0].platform == "cpu" and Path("/dev/nvidia0").exists():
        missing.append(f'JAX for the NVIDIA GPU of this machine: pip install "jax[cuda12]=={jax.__version__}"')
    console.print("missing: " + ("; ".join(missing) or "nothing"))
    if newer := untested_version():
        console.print(f"warning: {newer}")
    installed = [name for name in ("jaxshard", "jax", "jax-cuda12-plugin") if installed_version(name)]
    broken = {name: problem for package in installed for name, problem in broken_requirements(package).items()}
    broken |= broken_imports()
    for problem in broken.values():
        console.print(f"broken: {problem}")
    return int(bool(broken))


def broken_requirements(package: str) -> dict[str, str]:
    """Compare what is installed with what a package requires, and requires in its extras for accelerators and pictures.

    Returns:
      A sentence for each package that is installed in a version that does not fit, or required and not installed. One
      that only an extra requires may be absent.
    """
    broken = {}
    for requirement in map(Requirement, metadata.requires(package) or ()):
        marker, version = requirement.marker, installed_version(requirement.name)
        extra = next((name for name in ("", *_EXTRAS) if marker is None or marker.evaluate({"extra": name})), None)
        if extra is None or (extra and version is None):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            whose = f"{package}[{extra}]" if extra else package
            has = "is not installed" if version is None else f"{version} is installed"
            wanted = f"{requirement.name}{requirement.specifier}"
            broken[requirement.name] = (
                f"{requirement.name} {has}, but {whose} {installed_version(package)} needs {wanted}; "
                f'pip install "{wanted}"'
            )
    return broken


def broken_imports() -> dict[str, str]:
    """Import what every run needs; return a sentence for each module where that fails."""
    broken = {}
    for module in ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint"):
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a package of another version stumbles over
            reason = " ".join(str(error).split())
            broken[module] = f"import {module} fails with {type(error).__name__}: {reason}"
    return broken


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of every package that a result depends on; None for one not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}
