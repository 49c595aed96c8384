"""Put a layout or a step on the compile-only devices of a topology."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxshard.compiler.topology import Target, target_of, topology_devices, topology_mesh
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import mesh_str
from jaxshard.training.step import Step


def step_for(step: Step, target: Target) -> Step:
    """Make a step again on the devices of a topology; return the given step if its mesh has them, in any order.

    Args:
      step: a step on any mesh: simulated CPU devices, `planned_mesh`, or `topology_mesh`.
      target: the topology.

    Raises:
      ValueError: as `layout_for`.
    """
    layout = layout_for(step.layout, target)
    if layout is step.layout:
        return step
    return Step(
        step.loss_fn, step.tx, layout, step.engine,
        guarded=step.guarded, donate=step.donate, check_exchange=step.check_exchange,
    )  # fmt: skip


def layout_for(layout: Layout, target: Target) -> Layout:
    """Return a layout on the devices of a topology; the given layout if its mesh has them, in any order.

    Strategies place arrays only by the names and sizes of mesh axes, so all placements stay as they are on a mesh with
    the same axes and sizes.

    Raises:
      ValueError: the mesh does not have as many devices as the topology; says both.
    """
    mesh, devices = layout.mesh, topology_devices(target.name, num_slices=target.num_slices)
    if len(devices) != math.prod(mesh.shape.values()):
        slices = f"{target.num_slices} slices of " if target.num_slices > 1 else ""
        axes = ", ".join(f"{name}={size}" for name, size in _resized(mesh, len(devices)).items())
        several = f"num_slices={target.num_slices}, " if target.num_slices > 1 else ""
        raise ValueError(
            f"{slices}{target.name} has {len(devices)} devices, and the mesh of the step ({mesh_str(mesh)}) "
            f"{math.prod(mesh.shape.values())}; make the layout for a mesh of that size, such as "
            f'js.plan.planned_mesh("{target.name}", {several}{axes}), or take another topology'
        )
    if isinstance(mesh, Mesh) and isinstance(mesh.devices.flat[0], jax.Device) and target_of(mesh) == target:
        return layout
    return replace(layout, mesh=topology_mesh(target.name, num_slices=target.num_slices, **mesh.shape))


def _resized(mesh: Mesh | AbstractMesh, devices: int) -> dict[str, int]:
    """Suggest {axis: size} for `devices` devices: resize the first axis, and drop the others if they do not divide."""
    sizes = dict(mesh.shape)
    first = next(iter(sizes))
    rest = math.prod(sizes.values()) // sizes[first]
    return sizes | {first: devices // rest} if devices % rest == 0 else {first: devices}
