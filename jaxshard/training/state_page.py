"""Show a TrainState in a notebook: step, bytes of its parts and shape of every array, without reading values."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxshard.core.layout_text import human_bytes
from jaxshard.core.text_table import Folded, Section, Table, page
from jaxshard.core.tree import bytes_of, path_str

_SHOWN = 1000
"""The largest number of arrays that are listed."""


def state_page(run: Any) -> str:
    """Return a TrainState as HTML for a notebook.

    Args:
      run: the TrainState; it may have been donated to a step.
    """
    parts, listed = [], []
    for name in ("params", "opt_state", "state"):
        arrays = [
            (path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(getattr(run, name)) if is_array(x)
        ]
        if arrays:
            whole = sum(bytes_of(x.shape, x.dtype) for _, x in arrays)
            held = sum(bytes_held(x) for _, x in arrays)
            numbers = sum(math.prod(x.shape) for _, x in arrays)
            parts.append((name, f"{len(arrays):,}", f"{numbers:,}", human_bytes(whole), human_bytes(held)))
        listed += [(name, path, str(list(x.shape)), str(x.dtype), spec_of(x)) for path, x in arrays]
    shown = Table(listed[:_SHOWN], head=("", "array", "stored shape", "dtype", "spec"))
    more = f"... and {len(listed) - _SHOWN} more"
    sizes = Table(parts, "<>>>>", ("", "arrays", "numbers", "bytes", "bytes/device"))
    return page(
        Section(f"TrainState {step_of(run)}", [sizes]),
        Folded(f"all {len(listed):,} arrays", [shown, more if listed[_SHOWN:] else ""]),
    )


def is_array(x: Any) -> bool:
    """Return True if `x` has a shape and a dtype; it may have been donated."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def step_of(run: Any) -> str:
    """Describe the step of a TrainState: "at step 7", or that it was donated, or has shapes in place of arrays."""
    if not isinstance(run.step, jax.Array) or isinstance(run.step, jax.core.Tracer):
        return "of shapes"
    return "that was donated to a step" if run.step.is_deleted() else f"at step {int(run.step):,}"


def bytes_held(x: Any) -> int:
    """Return the bytes of an array on one device."""
    sharding = getattr(x, "sharding", None)
    return bytes_of(x.shape if sharding is None else sharding.shard_shape(x.shape), x.dtype)


def spec_of(x: Any) -> str:
    """Format the PartitionSpec of an array; return "" without a NamedSharding."""
    sharding = getattr(x, "sharding", None)
    return str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else ""
