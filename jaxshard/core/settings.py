"""Set JAX's configuration for this library's own programs, whatever the caller's configuration."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxshard.core.types import PyTree

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def own_settings(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Return a context in which programs for a mesh are traced and run, whatever the caller's configuration of JAX.

    `mesh` replaces a mesh that the caller activated (`jax.set_mesh`), which JAX would use for every array. A transfer
    guard is lifted: transfers of seeds, batches and constants to devices are intended here.

    Raises:
      RuntimeError: `jax.disable_jit` is on. Without compilation nothing is split: JAX would put every array on one
        device.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise RuntimeError(
            "jax.disable_jit is on, but layouts exist in compiled programs only. Leave it around loss_fn(model, batch, "
            "key) alone, which is an ordinary function; inside of a step jax.debug.print and jax.debug.breakpoint show "
            "values"
        )
    with jax.transfer_guard("allow"), own_mesh(mesh):
        yield


def own_mesh(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """Return a context in which `mesh` replaces the mesh that the caller activated, if any."""
    active = jax.sharding.get_abstract_mesh()
    if active.empty or active == (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    context: AbstractContextManager[Any] = jax.set_mesh(mesh)
    return context


def no_mesh() -> AbstractContextManager[Any]:
    """Return a context without an active mesh, for programs of one device."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = jax.set_mesh(Mesh(np.empty((), dtype=object), ()))
    return context


def settings_of(results: PyTree) -> AbstractContextManager[None]:
    """Return a context for programs on the arrays of a tree: `own_settings` for the mesh that they are on.

    If no array is on a mesh, the context changes nothing.
    """
    shardings = (x.sharding for x in jax.tree.leaves(results) if isinstance(x, jax.Array))
    mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    return contextlib.nullcontext() if mesh is None else own_settings(mesh)


def with_own_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with a parameter `layout` so that it runs under `own_settings(layout.mesh)`.

    Its programs are then traced and run for this mesh, whatever the caller's configuration of JAX.
    """
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            mesh = signature.bind(*args, **kwargs).arguments["layout"].mesh
        except (TypeError, AttributeError):  # wrong arguments or no layout: `fn` itself raises the error
            return fn(*args, **kwargs)
        with own_settings(mesh):
            return fn(*args, **kwargs)

    return run
