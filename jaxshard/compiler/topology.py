"""Make meshes of TPU topologies and GPUs that are not attached, for which `jax.jit` lowers and compiles programs.

mesh = topology_mesh("v5e:16x16", x=16, y=16)
layout = js.layout(js.fsdp(("x", "y")), mesh, init_fn, tx)
compiled = js.make_step(loss_fn, tx, layout).compile(batch_shapes)
compiled.memory_analysis().peak_memory_in_bytes
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from jaxshard.compiler.arrange import arrange
from jaxshard.compiler.gpus import check_gpu_compiler, gpu_options, plugin_module
from jaxshard.compiler.planned import GPUS, TPUS, PlannedDevice, chip_named, parse_topology, topology_name
from jaxshard.core.compat import start_plugin


class Target(NamedTuple):
    """A topology to compile for.

    Attributes:
      name: the name that the user gave, such as "v5e:4x4" or "h100:8".
      num_slices: the number of TPU slices.
    """

    name: str
    num_slices: int = 1

    def __str__(self) -> str:
        return f"{self.num_slices} x {self.name}" if self.num_slices > 1 else self.name

    @property
    def is_gpu(self) -> bool:
        """True for GPUs, False for TPUs."""
        return self.name.partition(":")[0].strip().lower() in GPUS

    def description(self) -> dict[str, Any]:
        """Return {"platform", "name", "topology"}, the arguments with which a compiler's plugin makes the topology."""
        if self.is_gpu:
            topology = parse_topology(self.name)
            return {"platform": "cuda", "name": "", "topology": gpu_options(topology.version, *topology.shape)}
        options: dict[str, Any] = {"num_slices": self.num_slices} if self.num_slices > 1 else {}
        if any(closed := _closed_dimensions(self.name)):
            options["wrap"] = closed
        return {"platform": "tpu", "name": self.name, "topology": options}


def parse_target(text: str) -> Target:
    """Parse the name of a topology, or of several slices of it: "v5e:4x4", "2 x v5e:4x4".

    >>> parse_target("2 x v5e:4x4")
    Target(name='v5e:4x4', num_slices=2)
    """
    several = re.fullmatch(r"([1-9]\d*)\s*x\s*(\D.*)", text.strip())
    return Target(several[2], int(several[1])) if several else Target(text.strip())


_targets: dict[int, Target] = {}
"""The target of each compile-only client, by `id`; `_make_devices` keeps the clients alive."""


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """Return the topology of a mesh of compile-only or planned devices; None for real devices."""
    if isinstance(mesh, AbstractMesh):
        return None
    device = mesh.devices.flat[0]
    if isinstance(device, PlannedDevice):
        return Target(device.topology, device.num_slices) if device.topology else None
    return _targets.get(id(device.client))


def topology_devices(name: str, *, num_slices: int = 1) -> list[jax.Device]:
    """Return the devices of a TPU topology, or of hosts of GPUs, to compile programs for without hardware.

    Programs compile for them with the memory limit of the real chip; they hold no arrays. The torus has the
    wrap-around links of the real chips: on v5e and v6e along dimensions of 16 chips, on v4, v5p and TPU7x along all
    dimensions if the slice consists of cubes of 4 x 4 x 4. Without these links, which is libtpu's default, a gather
    over all of a v5p:4x4x4 becomes an all-reduce, which moves twice the bytes (`benchmarks/README.md`).

    GPUs are described by hand (`compiler/gpus.py`), and their memory limit is not enforced.

    Args:
      name: version and shape, such as "v5e:2x4", "v5p:4x4x4" or "v6e:16x16"; for GPUs the number of GPUs in a host and
        of hosts: "h100:8", "h100:8x4".
      num_slices: the number of TPU slices, connected by the data center's network.

    Returns:
      The devices of all slices, in the compiler's order.

    Raises:
      ImportError: the package with the compiler is not installed: libtpu, or for GPUs JAX's CUDA plugin.
      ValueError: no such topology; lists similar ones.

    Example:
        devices = topology_devices("v5e:2x4")       # needs libtpu, the extra `tpu`
        devices[0].device_kind
    """
    name = topology_name(name)
    target = Target(name, num_slices)
    if target.is_gpu and num_slices != 1:
        raise ValueError(f"{name}: slices are of TPUs, got num_slices={num_slices}; write hosts x slices instead")
    check_compiler(target)
    if ":" not in name:  # for an empty name libtpu would choose a topology of its own
        parse_topology(name)
    try:
        return list(_make_devices(target))
    except jax.errors.JaxRuntimeError as error:
        parse_topology(name)  # lists similar names
        raise ValueError(
            f"no TPU topology {name!r}: {error}; write it as version:shape, such as v5e:2x4, v5p:2x2x4 or v6e:16x16"
        ) from error


@functools.cache
def _make_devices(target: Target) -> tuple[jax.Device, ...]:
    # libtpu takes a lock file for its chip; without this a second process that only compiles would abort on it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    about = target.description()
    make = functools.partial(topologies.get_topology_desc, about["name"], about["platform"], **about["topology"])
    try:
        devices: Any = make().devices
    except NotImplementedError:  # JAX has no plugin for this platform: without a driver, the one for GPUs did not start
        if not target.is_gpu:
            raise
        start_plugin(plugin_module())
        devices = make().devices
    _targets[id(devices[0].client)] = target
    return tuple(devices)


def check_compiler(target: Target) -> None:
    """Raise an ImportError with the command that installs the compiler of a target, if it is missing."""
    if target.is_gpu:
        check_gpu_compiler(parse_topology(target.name).version)
    elif importlib.util.find_spec("libtpu") is None:
        parse_topology(target.name)  # a wrong name is said first
        raise ImportError(
            f"compiling for the topology {target.name!r} needs the TPU compiler, and libtpu is not installed; "
            f'pip install "jax[tpu]=={jax.__version__}" (no TPU is needed)'
        )


def has_compiler(target: Target) -> bool:
    """Return True if the compiler of a target is installed in this Python environment."""
    try:
        check_compiler(target)
    except (ImportError, ValueError):  # not installed; or a GPU of which there is no description
        return False
    return True


def topology_mesh(name: str, /, *, num_slices: int = 1, **axes: int) -> Mesh:
    """Make a mesh with named axes over a TPU topology or GPUs, for which programs compile without hardware.

    If the sizes are the dimensions of the torus (in any order; slices and the cores of a chip count as dimensions),
    each axis runs along one dimension, as nested reduce-scatters need. Otherwise devices are ordered as `make_mesh`
    orders real devices; with several slices or cores by slice, coordinates and core. In measurements the order of the
    devices along an axis changed no collective.

    One axis over several dimensions of the torus stays one axis. Over a v5e:16x16, two axes of 16 turn the all-reduces
    of a step into reduce-scatters, with 35 % fewer bytes to wait for but 3 % more estimated cycles, since each
    collective uses the links of one dimension at a time. On v5p, one axis for each dimension is the better choice under
    `js.explicit` (`benchmarks/README.md`).

    Args:
      name: version and shape, such as "v5e:16x16", "v5p:4x4x8", "h100:8" (one host) or "h100:8x4" (4 hosts).
      num_slices: the number of TPU slices, connected by the data center's network.
      **axes: name and size of each axis; one size may be -1 and takes the remaining devices.

    Returns:
      A mesh of all devices, with axis types Auto.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: no such topology, or sizes that do not multiply to its number of devices.

    Example:
        mesh = js.plan.topology_mesh("v5e:2x4", data=8)     # needs libtpu, the extra `tpu`
        step = js.make_step(loss_fn, tx, js.layout(js.fsdp(), mesh, init_fn, tx))
        print(js.plan.compile_for(step, batch, "v5e:2x4"))
    """
    return arrange(name, topology_devices(name, num_slices=num_slices), num_slices, axes)


def _closed_dimensions(name: str) -> tuple[bool, ...]:
    """Return for each dimension of a TPU slice whether its links form a ring; () if that is not known."""
    version, _, shape = name.partition(":")
    network = chip_named(version).network if version in TPUS else None
    if network is None or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        return ()
    return (*network.closed(tuple(int(size) for size in shape.split("x"))), False)[:3]
