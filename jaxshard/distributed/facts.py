"""Collect the facts that processes compare before they compute together: versions, flags, mesh, layout, batch, program.

Each function returns {name: text} for `Peers.agree`. The error message shows the names and values of facts that differ,
so both are in the user's terms:

    {"version of jax": "0.10.2", "mesh": "data=4, tensor=2", "batch tokens": "int32[32, 65]", ...}
"""

from __future__ import annotations

import os
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.compat import installed_version
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import mesh_str
from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree
from jaxshard.distributed.mismatch import digest

_PACKAGES = ("jax", "jaxlib", "jaxshard", "flax", "optax")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_most_optimizations",
    "jax_use_shardy_partitioner",
)
"""Settings of JAX that change the compiled program or its results."""
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PER_HOST = ("dump", "host_platform_device_count", "_dir", "_path", "_file")
"""Compiler flags with one of these in their names may differ between hosts, since they do not change the program."""


def run_facts(layout: Layout) -> dict[str, str]:
    """Return {name: text} of the versions, flags, mesh and layout, which processes compare before they make a run."""
    mesh = layout.mesh
    devices = " ".join(str(device.id) for device in mesh.devices.flat)
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        **{f"version of {name}": installed_version(name) or "(not installed)" for name in _PACKAGES},
        **{f"setting {name}": str(getattr(jax.config, name, None)) for name in _SETTINGS},
        **{name: shared_flags(os.environ.get(name, "")) for name in _VARIABLES},
        "mesh": mesh_str(mesh),
        "devices of the mesh": devices,
        "layout": layout_text(layout),
    }


def layout_text(layout: Layout) -> str:
    """Describe a layout, with a line for each array: role, path, dtype, shape, and two PartitionSpecs.

    The first PartitionSpec is the sharding of the stored array between steps, the second its sharding where a step uses
    it.
    """
    # Stored shapes too: padding and the order of pipeline stages are part of the program.
    lines = [
        f"{role} {leaf.path} {leaf.dtype}{list(leaf.shape)} stored {list(p.view.stored)} {p.store} used {p.use}"
        for role, leaf, p in layout.placed()
    ]
    return "\n".join(["role path dtype[shape] placement", *lines])


def shared_flags(text: str) -> str:
    """Sort compiler flags, without flags that may differ between hosts, such as the folder for dumps."""
    chosen = [flag for flag in text.split() if not any(part in flag.split("=")[0] for part in _PER_HOST)]
    return " ".join(sorted(chosen))


def key_fact(key: jax.Array) -> dict[str, str]:
    """Return {"random key": uint32 words as text}; {} if the words are split over processes, so that none has all."""
    if not key.is_fully_addressable and not key.is_fully_replicated:
        return {}
    # A key array can't be compared as text, but its words can.
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    return {"random key": f"{words} ({jax.random.key_impl(key)})"}


def batch_facts(batch: PyTree) -> dict[str, str]:
    """Return {name of an array: its global dtype and shape as text} for a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {f"batch {path_str(path)}": f"{jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in leaves}


def row_facts(row: PyTree) -> dict[str, str]:
    """Return {name of an array: digest and first values as text} for the first row of the data.

    Every process reads this row. If its values differ between processes, so do their data or random seeds.

    Args:
      row: a tree of arrays [1, ...].
    """
    leaves = [(path_str(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(row)]

    def shown(x: np.ndarray) -> str:
        values = ", ".join(str(value) for value in x.ravel()[:6])
        return f"{digest(x.tobytes())} ({values}{', ...' if x.size > 6 else ''})"

    return {f"first row of the data, {path}": shown(x) for path, x in leaves}


def program_text(lowered: Any) -> str:
    """Return the StableHLO text of a lowered program, without source locations, which may differ between hosts."""
    return str(lowered.as_text())
