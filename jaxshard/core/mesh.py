"""Make meshes with named axes of type Auto, and simulated CPU devices to try them on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxshard.core.compat import backend_is_initialized, process_count_and_id
from jaxshard.core.types import AxisName


def make_mesh(devices: Sequence[jax.Device] | None = None, /, **axes: int) -> Mesh:
    """Make a mesh with named axes over all devices, in row-major order of the names.

    Axis types are Auto, so that unmodified Flax modules run on it.

    Args:
      devices: the devices; by default all.
      **axes: the size of each axis by its name. One size may be -1, for all remaining devices.

    Returns:
      The mesh. The last axis has the nearest neighbours: use it for the parallelism that communicates most.

    Raises:
      ValueError: no axis, more than one -1, a size below 1, or sizes that do not multiply to the number of devices.
      TypeError: a size that is not an integer.

    Example:
        >>> make_mesh(data=-1, tensor=1).axis_names
        ('data', 'tensor')
    """
    available = jax.device_count() if devices is None else len(devices)
    sizes = solve_sizes(axes, available)
    types = (AxisType.Auto,) * len(sizes)
    try:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    except NotImplementedError:  # an axis that is no product of dimensions of the torus, such as 4 of a v6e:8x8
        here = jax.devices() if devices is None else devices
        split = mesh_utils.create_device_mesh(tuple(sizes.values()), here, allow_split_physical_axes=True)
        return Mesh(split, tuple(sizes), axis_types=types)


def solve_sizes(axes: dict[str, int], devices: int) -> dict[str, int]:
    """Replace a size of -1 by the number of remaining devices: {"data": -1, "tensor": 2} on 8 gives data 4.

    Errors are those of `make_mesh`.
    """
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise ValueError(f"make_mesh: name at least one axis, such as data=-1, for the {devices} devices")
    if "devices" in axes:
        raise TypeError("make_mesh: devices go first, without a name: js.make_mesh(jax.devices()[:4], data=4)")
    if strange := [f"{name}={size!r}" for name, size in axes.items() if not isinstance(size, Integral)]:
        raise TypeError(f"make_mesh: every size must be a whole number, got {', '.join(strange)}")
    unknown = [name for name, size in axes.items() if size == -1]
    bad = [f"{name}={size}" for name, size in axes.items() if size < 1 and size != -1]
    if bad or len(unknown) > 1:
        raise ValueError(f"make_mesh: sizes must be at least 1, and at most one of them -1; got {asked}")
    known = math.prod(size for size in axes.values() if size != -1)
    if unknown:
        if devices % known:
            raise ValueError(
                f"make_mesh: {asked} leaves no size for {unknown[0]!r}: {devices} devices are not divisible by "
                f"{known}; use sizes whose product divides {devices}"
            )
        return axes | {unknown[0]: devices // known}
    if known != devices:
        raise ValueError(
            f"make_mesh: {asked} needs {known} devices, but there are {devices}{_other_counts(known, devices)}"
        )
    return dict(axes)


def _other_counts(wanted: int, devices: int) -> str:
    """Return advice for an error message: how to get `wanted` devices if there are `devices`."""
    processes = process_count_and_id()[0]
    if processes == 1 and wanted > devices:
        return (
            f"; take smaller sizes, whose product is {devices}, set one size to -1, or try it on simulated CPU "
            f"devices: js.simulate_devices({wanted}) at the top of the program"
        )
    if processes == 1:
        some = f"pass jax.devices()[:{wanted}] to use some of them"
        return f"; set one size to -1, {some}, or call js.simulate_devices({wanted}) first"
    simulate = f", or call js.simulate_devices({wanted // processes}) first" if wanted % processes == 0 else ""
    return (
        f" in {processes} processes (js.simulate_devices counts the devices of each process); set one size to -1"
        f"{simulate}"
    )


def simulate_devices(count: int) -> None:
    """Simulate several devices on the CPU, to try a mesh without the hardware.

    Call it at the top of a program, before JAX has touched any device.

    If several processes are started, by `jaxshard launch` for example, each of them has `count` devices: with
    `jaxshard launch -n 2` and `js.simulate_devices(4)` the mesh has eight.

    Args:
      count: the number of devices of this process, at least 1.

    Raises:
      RuntimeError: JAX already runs with another number of CPU devices in this process, or not on the CPU.
      ValueError: a count below 1.

    Example:
        js.simulate_devices(8)
        mesh = js.make_mesh(data=4, tensor=2)
    """
    if count < 1:
        raise ValueError(f"simulate_devices: the number of devices must be at least 1, got {count}")
    if not backend_is_initialized():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    elif jax.local_device_count() != count or jax.default_backend() != "cpu":
        where = " in this process" if jax.process_count() > 1 else ""
        raise RuntimeError(
            f"simulate_devices({count}): JAX already runs on {jax.local_device_count()} {jax.default_backend()} "
            f"device(s){where}; call it at the top of the program, before anything creates an array"
        )


class MeshById(NamedTuple):
    """A picklable description of a mesh, whose devices can't leave their process.

    Attributes:
      platform: the platform of the devices, such as "tpu".
      ids: the ids of the devices, an array of the mesh's shape as nested lists.
      axes: the names of the axes.
    """

    platform: str
    ids: Any
    axes: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> MeshById:
        """Describe a mesh by the ids of its devices."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
        return cls(mesh.devices.flat[0].platform, ids.tolist(), mesh.axis_names)

    def find(self) -> Mesh:
        """Make the described mesh again, from the devices of this process.

        Raises:
          ValueError: there are no such devices.
        """
        here = {device.id: device for device in jax.devices()}
        platform, ids = jax.default_backend(), np.array(self.ids)
        missing = [int(number) for number in ids.flat if number not in here]
        if missing or platform != self.platform:
            listed = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            without = f", without those of ids {listed}" if missing else ""
            raise ValueError(
                f"this layout is of a mesh of {ids.size} {self.platform} devices, and here are {len(here)} {platform} "
                f"ones{without}; load it where it was made, or make it anew with js.layout(strategy, "
                "js.make_mesh(...), init_fn, tx)"
            )
        devices = np.vectorize(here.__getitem__, otypes=[object])(ids)
        return Mesh(devices, self.axes, axis_types=(AxisType.Auto,) * len(self.axes))


def axis_names(axis: AxisName | None) -> tuple[str, ...]:
    """Convert a mesh axis to a tuple of names: "x" to ("x",), ("x", "y") to itself and None to ()."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def axis_size(mesh: Mesh, axis: AxisName | None) -> int:
    """Return the number of devices along an axis: the product of the sizes for a tuple, 1 for None."""
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def shares_threads(mesh: Mesh) -> bool:
    """Return True for a mesh of several CPU devices, which share the threads of a process.

    A mesh without devices (`AbstractMesh`) gives False.
    """
    return not isinstance(mesh, AbstractMesh) and mesh.size > 1 and bool(mesh.devices.flat[0].platform == "cpu")


def device_kind(mesh: Mesh) -> str:
    """Return the `device_kind` of a mesh's devices; "" for a mesh without devices."""
    return "" if isinstance(mesh, AbstractMesh) else str(mesh.devices.flat[0].device_kind)


def slice_indices(mesh: Mesh) -> np.ndarray:
    """Return the TPU slice index of every device of a mesh, in the mesh's shape; 0 on other platforms."""
    numbers = [slice_index(device) for device in mesh.devices.flat]
    return np.array(numbers).reshape(mesh.devices.shape)


def slice_index(device: jax.Device) -> int:
    """Return the index of a device's TPU slice; 0 on other platforms."""
    return getattr(device, "slice_index", 0) or 0


def mesh_str(mesh: Mesh) -> str:
    """Write the axes of a mesh with their sizes: "data=4, tensor=2"."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def mesh_inside(mesh: Mesh) -> Mesh | AbstractMesh:
    """Return the mesh to name in sharding constraints: `mesh`, or inside of a `shard_map` the mesh that JAX uses there.

    That mesh says which of its axes are manual.
    """
    inside = jax.sharding.get_abstract_mesh()
    return inside if inside.manual_axes else mesh


def check_is_here(mesh: Mesh) -> None:
    """Raise ValueError for a mesh of `js.plan.planned_mesh`: its devices do not exist, so nothing can be compiled."""
    device = mesh.devices.flat[0]
    if not isinstance(device, jax.Device):
        raise ValueError(
            f"the mesh ({mesh_str(mesh)}) is of planned devices ({device.device_kind}), which a step is predicted for "
            "but not compiled or run; use js.plan.topology_mesh to compile for TPUs that are not here, js.make_mesh to "
            "run"
        )


def check_axis(mesh: Mesh, axis: AxisName, who: str) -> tuple[str, ...]:
    """Return the names of `axis`; raise ValueError unless the mesh has each of them and none is repeated.

    Args:
      mesh: the mesh.
      axis: a mesh axis, or a tuple of axes.
      who: the strategy or function to name in the error.
    """
    names = axis_names(axis)
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        sizes = dict.fromkeys(mesh.axis_names[:1], -1) | dict(list(mesh.shape.items())[1:]) | dict.fromkeys(missing, 2)
        raise ValueError(
            f"{who}: the mesh ({mesh_str(mesh)}) has no axis {', '.join(map(repr, missing))}; use one of its axes, or "
            f"add it to the mesh: js.make_mesh({', '.join(f'{name}={size}' for name, size in sizes.items())})"
        )
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{who}: an axis must name each mesh axis once, got {axis!r}")
    return names
