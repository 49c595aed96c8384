"""Check 64-bit NumPy arrays, which JAX silently casts to 32 bits unless `jax_enable_x64` is set."""

from __future__ import annotations

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree

_NARROWED = {np.dtype(wide): np.dtype(narrow) for wide, narrow in [
    ("float64", "float32"), ("complex128", "complex64"), ("int64", "int32"), ("uint64", "uint32"),
]}  # fmt: skip
_SWITCH = 'or switch 64-bit numbers on: jax.config.update("jax_enable_x64", True)'


def check_narrowing(tree: PyTree, what: str) -> None:
    """Raise or warn if values of 64-bit NumPy arrays do not survive the cast to 32 bits.

    Warn once per array of floating-point or complex numbers, which lose half their digits. Integers pass if their
    values fit.

    Args:
      tree: arrays; only NumPy arrays are checked.
      what: the name of the tree, for messages.

    Raises:
      ValueError: integers that do not fit; the message names every array, with a value that does not fit.
    """
    if jnp.result_type(float) == jnp.float64:
        return
    floats, problems = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        narrow = _NARROWED.get(x.dtype) if isinstance(x, (np.ndarray, np.generic)) else None
        if narrow is None or not x.size:
            continue
        name = f"{path_str(path) or what}: {x.dtype}"
        if narrow.kind in "fc":
            floats.append(f"{name} becomes {narrow}")
            continue
        limits = np.iinfo(narrow)
        problems += [
            f"{name} holds {value}, beyond {limits.min} to {limits.max} of {narrow}"
            for value in (x.min(), x.max())
            if not limits.min <= value <= limits.max
        ]
    raise_all(problems, ValueError, f"numbers of {what} do not fit into 32 bits; use smaller ones, {_SWITCH}")
    if floats:
        _warn_once(what, tuple(floats))


@cache
def _warn_once(what: str, arrays: tuple[str, ...]) -> None:
    warnings.warn(
        f"{what} is narrowed: {', '.join(arrays)}. Cast it yourself where that is meant, {_SWITCH}", stacklevel=4
    )
