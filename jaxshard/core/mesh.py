"""Meshes: named axes over devices, always with Auto axis types, and simulated devices to try them on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import jax
from jax.sharding import AxisType, Mesh

from jaxshard.core.compat import backend_is_initialized
from jaxshard.core.types import AxisName


def make_mesh(devices: Sequence[jax.Device] | None = None, /, **axes: int) -> Mesh:
    """A mesh with the named axes, over all devices unless some are given, in row-major order of the names.

    One size may be -1: it takes what the others leave. Axis types are Auto, so that unmodified Flax modules run on it.

    >>> make_mesh(data=-1, tensor=1).axis_names
    ('data', 'tensor')

    Raises:
      ValueError: no axis, more than one -1, a size below 1, or sizes that do not multiply to the number of devices.
      TypeError: a size that is no whole number.
    """
    available = jax.device_count() if devices is None else len(devices)
    sizes = solve_sizes(axes, available)
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def solve_sizes(axes: dict[str, int], devices: int) -> dict[str, int]:
    """The axis sizes with -1 solved so that they multiply to the number of devices."""
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise ValueError(f"make_mesh: name at least one axis, such as data=-1, for the {devices} devices at hand")
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
                f"make_mesh: {asked} leaves nothing whole for {unknown[0]!r}: {devices} devices are not divisible by "
                f"{known}; use sizes whose product divides {devices}"
            )
        return axes | {unknown[0]: devices // known}
    if known != devices:
        raise ValueError(
            f"make_mesh: {asked} needs {known} devices, but there are {devices}; set one size to "
            f"-1, pass jax.devices()[:{known}] to use some of them, or call js.simulate_devices({known}) first"
        )
    return dict(axes)


def simulate_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices; to be called before JAX has touched any device.

    Raises:
      RuntimeError: JAX already runs with another number of CPU devices.
    """
    if count < 1:
        raise ValueError(f"simulate_devices: the number of devices must be at least 1, got {count}")
    if not backend_is_initialized():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    elif jax.device_count() != count or jax.default_backend() != "cpu":
        raise RuntimeError(
            f"simulate_devices({count}): JAX already runs on {jax.device_count()} {jax.default_backend()} device(s); "
            "call it at the top of the program, before anything creates an array"
        )


def axis_names(axis: AxisName | None) -> tuple[str, ...]:
    """An axis, a tuple of axes or None as a tuple of names."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def axis_size(mesh: Mesh, axis: AxisName | None) -> int:
    """Over how many devices the axis, or the product of a tuple of axes, splits."""
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def check_axis(mesh: Mesh, axis: AxisName, who: str) -> tuple[str, ...]:
    """The names of `axis`, all of them in the mesh and none twice."""
    names = axis_names(axis)
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        shape = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(f"{who}: the mesh ({shape}) has no axis {', '.join(map(repr, missing))}; use one of its axes")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{who}: an axis must name each mesh axis once, got {axis!r}")
    return names
