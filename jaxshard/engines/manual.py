"""`shard_map` as engines use it: over which axes, with which specs, and nested for collectives over automatic axes."""

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
    """Return the shape of a weight where one device uses it: a part of it over manual axes that its `use` has."""
    use = only_axes(placement.use, layout.manual_axes)
    return tuple(size // parts for size, parts in zip(placement.view.logical, splits_per_dim(layout.mesh, use)))


def on_each_device(
    fn: _Function, layout: Layout, axes: Set[str], *, in_specs: PyTree, out_specs: PyTree
) -> _Function | Callable[..., Any]:
    """Return `fn` of global arrays that runs once per device along the axes, on this device's shards.

    The other axes stay automatic: there the compiler splits the work. Without axes `fn` itself is returned.
    """
    if not axes:
        return fn
    # Inside another `shard_map`, of the replicas of `js.local`, the mesh is that one's.
    mesh = None if _axes_outside() else layout.mesh
    # check_vma=False: the user's code may mix what varies over the axes with what does not, without casts.
    how: dict[str, Any] = {"mesh": mesh, "out_specs": out_specs, "axis_names": set(axes), "check_vma": False}
    if (joint := joint_in_force()) is not None:
        return partial(jax.shard_map(joint.inside(fn), in_specs=(PartitionSpec(), *in_specs), **how), joint.now)
    mapped: Callable[..., Any] = jax.shard_map(fn, in_specs=in_specs, **how)
    return mapped


def _axes_outside() -> frozenset[str]:
    """Return the axes that an enclosing `shard_map` handles."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def stored_specs(placements: PyTree, axes: Set[str]) -> PyTree:
    """Return the specs of stored arrays, only the axes that `shard_map` handles."""
    return jax.tree.map(lambda placement: only_axes(placement.store, axes), placements)


def used_specs(placements: PyTree, axes: Set[str]) -> PyTree:
    """Return the specs of arrays as the loss sees them, only the axes that `shard_map` handles."""
    return jax.tree.map(lambda placement: only_axes(placement.use, axes), placements)


def row_specs(layout: Layout, batch: PyTree) -> PyTree:
    """Return the specs of the arrays of a global batch."""
    return jax.tree.map(lambda placement: placement.store, layout.batch_placements(batch))


def nest_in_shard_map(layout: Layout, fn: Callable[..., Any], spec: PartitionSpec) -> Callable[..., Any]:
    """Return `fn`, a collective, in a nested `shard_map` over the axes that the compiler handles.

    A manual collective of an array that is also split over an automatic axis gathers it over that axis too (JAX 0.10 to
    0.12), and in bf16, split or not, it aborts the CPU compiler. Inside the nested `shard_map` all axes are manual.
    """
    manual = layout.manual_axes
    automatic = set(layout.mesh.axis_names) - manual - _axes_outside()
    if not automatic or not manual:
        return fn
    own = only_axes(spec, automatic)
    nested: Callable[..., Any] = jax.shard_map(fn, in_specs=own, out_specs=own, axis_names=automatic, check_vma=False)
    return nested
