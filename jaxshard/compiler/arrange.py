"""Arrange the devices of a topology, real or planned, as a mesh whose axes run along the dimensions of the torus."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxshard.core.mesh import make_mesh, slice_index, solve_sizes


def arrange(name: str, devices: Sequence[Any], num_slices: int, axes: dict[str, int]) -> Mesh:
    """Arrange devices as a mesh whose axes run along the dimensions of the TPU torus, where the sizes allow it.

    Args:
      name: the name of the topology, such as "v5e:4x4", for error messages.
      devices: the devices of the topology: `jax.Device`s, or `PlannedDevice`s, which have the same attributes.
      num_slices: the number of TPU slices.
      axes: name and size of each axis.

    Raises:
      ValueError: sizes that do not multiply to the number of devices; the message says both.
    """
    sizes = _solve(name, num_slices, axes, len(devices))
    types = (AxisType.Auto,) * len(sizes)
    if devices[0].platform != "tpu":
        return Mesh(_array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    # The devices as an array with one dimension per dimension of the torus that has several of them.
    by_place = {_place(device): device for device in devices}
    extents = [len(set(places)) for places in zip(*by_place, strict=True)]
    torus = [extent for extent in extents if extent > 1]
    grid = _array([by_place[place] for place in sorted(by_place)]).reshape(torus)
    wanted = [size for size in sizes.values() if size > 1]
    for order in itertools.permutations(range(len(torus))):
        if [torus[dim] for dim in order] == wanted:
            return Mesh(grid.transpose(order).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    # `jax.make_mesh` supports neither several slices nor chips with a device for each core.
    if num_slices > 1 or len({device.core_on_chip for device in devices}) > 1:
        return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    return make_mesh(devices, **sizes)


def _solve(name: str, num_slices: int, axes: dict[str, int], devices: int) -> dict[str, int]:
    """Return the sizes of the mesh axes, with -1 replaced; raise ValueError if their product is not `devices`."""
    known = math.prod(size for size in axes.values() if size != -1)
    if axes and all(size > 0 for size in axes.values()) and known != devices:
        topology = f"{num_slices} x {name}" if num_slices > 1 else name
        asked = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(
            f"{topology}: {asked} needs {known} devices, but there are {devices}; change a size (one may be -1, which "
            "takes the remaining devices), or take another topology"
        )
    return solve_sizes(axes, devices)


def _array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _place(device: Any) -> tuple[int, ...]:
    """Return (index of the slice, *coordinates in the slice, index of the core on the chip) of a TPU device."""
    return (slice_index(device), *device.coords, device.core_on_chip)
