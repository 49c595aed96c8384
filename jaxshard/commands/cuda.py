"""The plugin of JAX that an NVIDIA GPU needs: which one, and whether it is missing. Imports no JAX."""

import os
from pathlib import Path

from jaxshard.core.installed import installed_version

GPU = Path("/dev/nvidia0")
PLUGINS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin"}
"""The plugin of each extra; the first one works with more GPUs and with older drivers."""


def missing_plugin() -> str | None:
    """Return what to install for the GPU of this machine.

    Returns:
      a requirement such as "jax[cuda12]==0.10.2"; None if there is no GPU, if a plugin has jaxlib's version, or if
      JAX_PLATFORMS names neither "cuda" nor "gpu".
    """
    platforms = os.environ.get("JAX_PLATFORMS")
    if not GPU.exists() or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return None
    found = {extra: version for extra, plugin in PLUGINS.items() if (version := installed_version(plugin))}
    if installed_version("jaxlib") in found.values():
        return None
    return f"jax[{next(iter(found or PLUGINS))}]=={installed_version('jax')}"
