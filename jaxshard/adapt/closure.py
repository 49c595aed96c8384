"""Check that the arrays that a loss closes over are not placed on devices outside of the layout's mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxshard.core.tree import path_str, raise_all


def check_closure(loss_fn: Callable[..., Any], mesh: Mesh) -> None:
    """Refuse a loss that closes over arrays that are placed on other devices than the mesh.

    JAX would copy such an array into the program as a constant, replicated on every device and never trained.
    Uncommitted arrays, NumPy arrays, arrays on all devices of the mesh, and arrays on a single device of the mesh are
    allowed.

    Raises:
      ValueError: names every such array, with its devices.
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
    if not inspect.isfunction(function) or not isinstance(mesh, Mesh):
        return
    around = inspect.getclosurevars(function)
    wanted: set[Any] = set(mesh.devices.flat)
    problems = []
    for name, value in {**around.globals, **around.nonlocals}.items():
        try:
            leaves = jax.tree_util.tree_leaves_with_path(value)
        except (TypeError, ValueError):  # a dict whose keys can't be sorted is no tree
            continue
        for path, x in leaves:
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and _elsewhere(x, wanted):
                leaf = f"{name}/{path_str(path)}" if path else name
                found: set[Any] = x.sharding.device_set
                devices = sorted(device.id for device in found)
                problems.append(f"{leaf}: {x.dtype}{list(x.shape)} on devices {devices}")
    raise_all(
        problems,
        ValueError,
        f"{function.__qualname__} closes over arrays that live on other devices than the mesh of the layout "
        f"({sorted(device.id for device in wanted)}); pass them in the batch, return them from init_fn as state, or "
        "make them NumPy arrays",
    )


def _elsewhere(x: jax.Array, wanted: set[Any]) -> bool:
    found = x.sharding.device_set
    return bool(x.committed) and not (found == wanted if len(found) > 1 else found <= wanted)
