"""TPU topologies that are not at hand: meshes over their chips, for which `jax.jit` lowers and compiles anyway.

mesh = topology_mesh("v5e:16x16", x=16, y=16)
layout = js.layout(js.fsdp(("x", "y")), mesh, init_fn, tx)
compiled = js.make_step(loss_fn, tx, layout).compile(batch_shapes)
compiled.memory_analysis().peak_memory_in_bytes
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxshard.core.mesh import make_mesh, slice_index, solve_sizes


def topology_devices(name: str, *, num_slices: int = 1) -> list[jax.Device]:
    """Return the devices of a TPU topology, for compiling without hardware.

    Programs compile for them with the memory of the real chip enforced; they hold no arrays. The torus has the links
    that close a dimension to a ring where the real one has them: v5e and v6e along 16 chips, v4, v5p and TPU7x in all
    dimensions of slices made of cubes of 4 x 4 x 4. Without being asked libtpu leaves them out, and then gathers over
    all of a v5p:4x4x4 by all-reduces, which move twice the bytes (`benchmarks/README.md`).

    Args:
      name: version and shape, such as "v5e:2x4", "v5p:4x4x4" or "v6e:16x16".
      num_slices: that many copies of it, connected by the data center's network.

    Returns:
      The devices of all slices, in the compiler's order.

    Raises:
      ImportError: libtpu, which holds the compiler, is not installed.
      ValueError: no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"compiling for the topology {name!r} needs the TPU compiler, and libtpu is not installed; "
            f'pip install "jax[tpu]=={jax.__version__}" (no TPU is needed)'
        )
    # libtpu takes a lock file for its chip; without this a second process that only compiles would abort on it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if ":" not in name:  # an empty name would be taken for some topology of libtpu's choice
        raise ValueError(f"no TPU topology {name!r}: write version:shape, such as v5e:2x4, v5p:2x2x4 or v6e:16x16")
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if any(closed := _closed_dimensions(name)):
        options["wrap"] = closed
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"no TPU topology {name!r}: {error}; write it as version:shape, such as v5e:2x4, v5p:2x2x4 or v6e:16x16"
        ) from error


def topology_mesh(name: str, /, *, num_slices: int = 1, **axes: int) -> Mesh:
    """Make a mesh with named axes over a TPU topology.

    Where the sizes are those of the torus (in any order; slices and the cores of a chip are dimensions too), every axis
    runs along one dimension of it, which is what nested reduce-scatters need. Otherwise devices are ordered as
    `make_mesh` orders real ones, or, where it can't, by slice, coordinates and core. The order of the devices along an
    axis changed no collective, and an axis that was asked for is not split: over a v5e:16x16 two axes make a step's
    all-reduces reduce-scatters, which leaves 35 % fewer bytes to wait for, but takes 3 % more estimated cycles and uses
    the links of one dimension at a time. On v5p one axis for each dimension is the better choice under `js.explicit`
    (`benchmarks/README.md`).

    Args:
      name: version and shape, as for `topology_devices`.
      num_slices: as for `topology_devices`.
      **axes: name and size of each axis; one size may be -1 and takes what the others leave.

    Returns:
      A mesh of all devices, with axis types Auto.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: no such topology, or sizes that do not multiply to its number of devices.
    """
    return arrange(name, topology_devices(name, num_slices=num_slices), num_slices, axes)


def arrange(name: str, devices: Sequence[Any], num_slices: int, axes: dict[str, int]) -> Mesh:
    """Make a mesh of the devices of a topology, as `topology_mesh` describes it.

    Args:
      name: the topology, for messages.
      devices: `jax.Device`s of it, or stand-ins with their attributes.
      num_slices: how many slices they are in.
      axes: name and size of each axis.

    Raises:
      ValueError: sizes that do not multiply to the number of devices; says both, and sizes that do.
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
    # `jax.make_mesh` knows neither several slices nor chips that show their cores apart.
    if num_slices > 1 or len({device.core_on_chip for device in devices}) > 1:
        return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    return make_mesh(devices, **sizes)


def _solve(name: str, num_slices: int, axes: dict[str, int], devices: int) -> dict[str, int]:
    """The sizes of all axes; a refusal names the topology instead of the devices of this process."""
    known = math.prod(size for size in axes.values() if size != -1)
    if axes and all(size > 0 for size in axes.values()) and known != devices:
        whole = f"{num_slices} x {name}" if num_slices > 1 else name
        asked = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(
            f"{whole}: {asked} needs {known} devices, but there are {devices}; change a size (one may be -1 and takes "
            "what the others leave), or take another topology"
        )
    return solve_sizes(axes, devices)


def _array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _closed_dimensions(name: str) -> tuple[bool, ...]:
    """Which dimensions of a slice are rings, by Google's description of its shape; () where that is not known."""
    version, _, shape = name.partition(":")
    if not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        return ()
    sizes = [int(size) for size in shape.split("x")]
    if version in ("v5e", "v6e") and len(sizes) == 2:
        return (*(size % 16 == 0 for size in sizes), False)
    if version in ("v4", "v5p", "tpu7x") and len(sizes) == 3:
        return (all(size % 4 == 0 for size in sizes),) * 3
    return ()


def _place(device: Any) -> tuple[int, ...]:
    """Slice, coordinates in it, and core of the chip."""
    return (slice_index(device), *device.coords, device.core_on_chip)
