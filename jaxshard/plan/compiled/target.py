"""A step made again for a topology that is not here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxshard.core.mesh import mesh_str
from jaxshard.plan.topology import topology_devices, topology_mesh
from jaxshard.training.step import Step


def step_for(step: Step, topology: str, num_slices: int) -> Step:
    """Return the same step on the devices of a topology.

    Strategies place arrays by the axes of a mesh and their sizes alone, so the layout stays as it is, placement by
    placement, on a mesh of the same axes and sizes.

    Args:
      step: made for any mesh: simulated CPU devices, `planned_mesh`, or `topology_mesh`.
      topology: as for `topology_mesh`.
      num_slices: as for `topology_mesh`.

    Returns:
      The step itself if its mesh has the devices of the topology already, whose order is kept; else a new one.

    Raises:
      ValueError: the mesh does not have as many devices as the topology; says both.
    """
    mesh, devices = step.layout.mesh, topology_devices(topology, num_slices=num_slices)
    if len(devices) != math.prod(mesh.shape.values()):
        slices = f"{num_slices} slices of " if num_slices > 1 else ""
        axes = ", ".join(f"{name}={size}" for name, size in _resized(mesh, len(devices)).items())
        several = f"num_slices={num_slices}, " if num_slices > 1 else ""
        raise ValueError(
            f"{slices}{topology} has {len(devices)} devices, and the mesh of the step ({mesh_str(mesh)}) "
            f"{math.prod(mesh.shape.values())}; make the layout for a mesh of that size, such as "
            f'js.plan.planned_mesh("{topology}", {several}{axes}), or take another topology'
        )
    if isinstance(mesh, Mesh) and _describe(mesh.devices.flat) == _describe(devices):
        return step
    target = topology_mesh(topology, num_slices=num_slices, **mesh.shape)
    layout = replace(step.layout, mesh=target)
    return Step(
        step.loss_fn, step.tx, layout, step.engine,
        guarded=step.guarded, donate=step.donate, check_exchange=step.check_exchange,
    )  # fmt: skip


def _describe(devices: Any) -> set[tuple[Any, ...]] | None:
    """What tells devices of a compiler apart; None for others."""
    devices = list(devices)
    here = isinstance(devices[0], jax.Device)
    if not here or getattr(devices[0].client, "runtime_type", "") != "compile_only_runtime":
        return None
    return {(one.id, one.device_kind, getattr(one, "slice_index", 0)) for one in devices}


def _resized(mesh: Mesh | AbstractMesh, devices: int) -> dict[str, int]:
    """The axes of a mesh with the first one left open, where the others divide the number of devices."""
    sizes = dict(mesh.shape)
    first = next(iter(sizes))
    rest = math.prod(sizes.values()) // sizes[first]
    return sizes | {first: devices // rest} if devices % rest == 0 else {first: devices}
