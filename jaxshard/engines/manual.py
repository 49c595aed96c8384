"""Helpers of engines for `shard_map`: its axes, its specs, and a nested one for collectives over automatic axes."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement, only_axes, splits_per_dim
from jaxshard.core.types import PyTree
from jaxshard.engines.joint import joint_in_force

_Function = TypeVar("_Function", bound=Callable[..., Any])


def used_shape(layout: Layout, placement: Placement) -> tuple[int, ...]:
    """Return the shape that a gathered weight has on one device, inside the `shard_map`.

    It is the logical shape, divided only by the manual axes that split the weight in use.
    """
    use = only_axes(placement.use, layout.manual_axes)
    return tuple(size // parts for size, parts in zip(placement.view.logical, splits_per_dim(layout.mesh, use)))


def on_each_device(
    fn: _Function, layout: Layout, axes: Set[str], *, in_specs: PyTree, out_specs: PyTree
) -> _Function | Callable[..., Any]:
    """Wrap `fn`, which computes on one device's shards, in a `shard_map` over `axes`; the result takes global arrays.

    All other mesh axes stay automatic: the compiler splits the work over them. Without axes return `fn` itself.
    """
    if not axes:
        return fn
    # Inside the `shard_map` of the replicas of `js.local`, the mesh is taken from it.
    mesh = None if _manual_axes_outside() else layout.mesh
    # check_vma=False: the user's code may mix values that vary over the axes with values that do not, without casts.
    how: dict[str, Any] = {"mesh": mesh, "out_specs": out_specs, "axis_names": set(axes), "check_vma": False}
    if (joint := joint_in_force()) is not None:
        return partial(jax.shard_map(joint.inside(fn), in_specs=(PartitionSpec(), *in_specs), **how), joint.now)
    mapped: Callable[..., Any] = jax.shard_map(fn, in_specs=in_specs, **how)
    return mapped


def _manual_axes_outside() -> frozenset[str]:
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def stored_specs(placements: PyTree, axes: Set[str]) -> PyTree:
    """Return the `PartitionSpec` of each array as stored, leaving out mesh axes that are not in `axes`."""
    return jax.tree.map(lambda placement: only_axes(placement.store, axes), placements)


def used_specs(placements: PyTree, axes: Set[str]) -> PyTree:
    """Return the `PartitionSpec` of each array as computation uses it, leaving out mesh axes that are not in `axes`."""
    return jax.tree.map(lambda placement: only_axes(placement.use, axes), placements)


def row_specs(layout: Layout, batch: PyTree) -> PyTree:
    """Return the `PartitionSpec` of each array of a global batch, whose rows the batch axes split."""
    return jax.tree.map(lambda placement: placement.store, layout.batch_placements(batch))


def nest_in_shard_map(layout: Layout, fn: Callable[..., Any], spec: PartitionSpec) -> Callable[..., Any]:
    """Wrap a collective `fn` in a nested `shard_map` over the axes that are still automatic.

    A manual collective of an array that is also split over an automatic axis gathers it over that axis too (JAX 0.10 to
    0.12), and in bf16, split or not, it aborts the CPU compiler. Inside the nested `shard_map` all axes are manual.

    Args:
      layout: the layout.
      fn: a function that issues a collective over manual axes.
      spec: the sharding of the arguments and results of `fn`.

    Returns:
      The wrapped function, or `fn` itself if no axis is automatic or none is manual.
    """
    manual = layout.manual_axes
    automatic = set(layout.mesh.axis_names) - manual - _manual_axes_outside()
    if not automatic or not manual:
        return fn
    own = only_axes(spec, automatic)
    nested: Callable[..., Any] = jax.shard_map(fn, in_specs=own, out_specs=own, axis_names=automatic, check_vma=False)
    return nested
