"""`jaxshard doctor`: print devices and versions, and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

import jax

from jaxshard.commands.devices import choose_devices, describe
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.terminal import facts, make_console
from jaxshard.core.compat import NEWEST_TESTED, installed_version, untested_version

_PACKAGES = ("jaxshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_OPTIONAL = {
    "libtpu": "compiling for TPU topologies (extra tpu)",
    "tensorboardX": "jaxshard train --tensorboard (extra viz)",
    "matplotlib": "pictures (extra viz)",
}


def run() -> None:
    """Print devices and versions, and what is missing."""
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
        missing.append('JAX for the NVIDIA GPU of this machine: pip install "jax[cuda12]"')
    console.print("missing: " + ("; ".join(missing) or "nothing"))
    if newer := untested_version():
        console.print(f"warning: {newer}")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of every package that a result depends on; None for one not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}
