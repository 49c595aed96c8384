"""TPU topologies that are not here: meshes over their chips, for which `jax.jit` lowers and compiles anyway."""

from __future__ import annotations

import importlib.util
import itertools
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxshard.core.mesh import make_mesh, solve_sizes


def topology_devices(name: str, *, num_slices: int = 1) -> list[jax.Device]:
    """The devices of a TPU topology such as "v5e:2x4", "v5p:4x4x4" or "v6e:16x16", times `num_slices`.

    They compile, with the memory of the real chip enforced; they hold no arrays.

    Raises:
      ImportError: libtpu, which holds the compiler, is not installed.
      ValueError: no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"compiling for the topology {name!r} needs the TPU compiler, and libtpu is not installed; "
            'pip install "jaxshard[tpu]" (no TPU is needed)'
        )
    # Without it a second process that compiles aborts on a lock file that guards a chip which is not there.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    slices = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, "tpu", **slices).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"no TPU topology {name!r}: {error}; write it as version:shape, such as v5e:2x4, v5p:2x2x4 or v6e:16x16"
        ) from error


def topology_mesh(name: str, /, *, num_slices: int = 1, **axes: int) -> Mesh:
    """A mesh with the named axes over a TPU topology; one size may be -1; axis types are Auto.

    Where the sizes are those of the torus (in any order; slices and the cores of a chip are dimensions too), every axis
    runs along one dimension of it, which is what nested reduce-scatters need. Otherwise devices are ordered as
    `make_mesh` orders real ones, or, where it can't, by slice, coordinates and core.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: no such topology, or sizes that do not multiply to its number of devices.
    """
    devices = topology_devices(name, num_slices=num_slices)
    sizes = solve_sizes(axes, len(devices))
    keys = sorted({_coordinates(device): device for device in devices}.items(), key=lambda item: item[0])
    extents = [len({key[dim] for key, _ in keys}) for dim in range(len(keys[0][0]))]
    torus = [extent for extent in extents if extent > 1]
    grid = np.array([device for _, device in keys], dtype=object).reshape(torus)
    wanted = [size for size in sizes.values() if size > 1]
    types = (AxisType.Auto,) * len(sizes)
    for order in itertools.permutations(range(len(torus))):
        if [torus[dim] for dim in order] == wanted:
            return Mesh(grid.transpose(order).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    if num_slices > 1 or len({device.core_on_chip for device in devices}) > 1:
        return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    return make_mesh(devices, **sizes)


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    return (getattr(device, "slice_index", 0) or 0, *device.coords, device.core_on_chip)
