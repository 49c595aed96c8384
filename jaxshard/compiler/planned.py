"""Make meshes of planned devices: TPU slices and GPU hosts by name, without a compiler and without hardware.

mesh = planned_mesh("h100:8x4", data=32)
layout = js.layout(js.fsdp(), mesh, init_fn, tx)
print(js.plan.predict(layout, loss_fn, batch, js.explicit(), tx=tx))

Layouts, promises and predictions need only the kind of each device and its place in the network. To compile,
`topology_mesh` makes a mesh of the compiler's own devices, with the same ids in the same order.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxshard.compiler.arrange import arrange
from jaxshard.core.bounds import MOST_LISTED
from jaxshard.cost.hardware import KINDS, Chip
from jaxshard.cost.hardware import chip as chip_of


@dataclass(frozen=True)
class PlannedDevice:
    """A stand-in for a device that is not attached, with the attributes of a `jax.Device`.

    It also has the `topology` and `num_slices` for which it was planned, such as "v5e:4x4" and 1.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    num_cores: int = 1
    compute_capability: str = ""
    topology: str = ""
    num_slices: int = 1

    @property
    def client(self) -> Any:
        """A stand-in for a JAX client, from which tracing reads the runtime's version; it can't compile."""
        version = "planned rocm" if self.compute_capability.startswith("gfx") else "planned"
        return SimpleNamespace(platform="planned", platform_version=version, process_index=lambda: -1)

    def addressable_memories(self) -> list[Any]:
        """Return the device's memories, such as "device" and "pinned_host", as `jax.Device` does."""
        return [SimpleNamespace(kind="device"), SimpleNamespace(kind="pinned_host")]


class Slices(NamedTuple):
    """The shapes in which slices of one TPU version are offered.

    Attributes:
      kind: the `device_kind` in JAX, such as "TPU v5 lite".
      shapes: the small shapes; larger ones consist of cubes of 4 x 4 x 4 chips, if `cubes` is above 0.
      cubes: the most cubes along a dimension.
      chips: the most chips in one slice.
      cores: the number of JAX devices of each chip.
      num_cores: the number of cores of each device.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    cubes: int = 0
    chips: int = 256
    cores: int = 1
    num_cores: int = 1


class Hosts(NamedTuple):
    """GPUs of one kind: `device_kind`, compute capability, and the most GPUs that one host or NVLink domain has.

    AMD's GPUs have an architecture, such as "gfx942", in place of a compute capability, as in JAX.
    """

    kind: str
    capability: str
    most: int = 8


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# Google's lists of slices: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x. Kinds and cores are libtpu's.
TPUS = {
    "v4": Slices(KINDS["v4"], _CUBIC, 4, 4096, 2, 1),
    "v5e": Slices(KINDS["v5e"], _FLAT),
    "v5p": Slices(KINDS["v5p"], _CUBIC, 6, 6144, 1, 2),
    "v6e": Slices(KINDS["v6e"], _FLAT),
    "tpu7x": Slices(KINDS["tpu7x"], _CUBIC, 9, 9216, 2, 1),
}
"""The shapes of slices of each TPU version."""

# The makers' data sheets, as in `cost/hardware.py`; compute capabilities from developer.nvidia.com/cuda-gpus.
GPUS = {
    "a10": Hosts(KINDS["a10"], "8.6"),
    "a100": Hosts(KINDS["a100"], "8.0", 16),
    "a100-40gb": Hosts(KINDS["a100-40gb"], "8.0", 16),
    "b200": Hosts(KINDS["b200"], "10.0"),
    "gb200": Hosts(KINDS["gb200"], "10.0", 72),
    "h100": Hosts(KINDS["h100"], "9.0"),
    "h200": Hosts(KINDS["h200"], "9.0"),
    "l4": Hosts(KINDS["l4"], "8.9"),
    "l40s": Hosts(KINDS["l40s"], "8.9"),
    "mi300x": Hosts(KINDS["mi300x"], "gfx942"),
}
"""The kinds of GPUs by name, with the most GPUs in one host or one domain of NVLink."""


class Topology(NamedTuple):
    """A parsed topology: its `version` ("v5e", "h100") and its `shape`; for GPUs that is (GPUs per host, hosts)."""

    version: str
    shape: tuple[int, ...]

    @property
    def is_gpu(self) -> bool:
        """True for GPUs, False for TPUs."""
        return self.version in GPUS

    def __str__(self) -> str:
        """Write the topology as users do: "v5e:16x16"."""
        return _name(self.version, self.shape)


def parse_topology(name: str) -> Topology:
    """Parse the name of a topology.

        >>> parse_topology("v5p:4x4x8")
        Topology(version='v5p', shape=(4, 4, 8))

    Args:
      name: version and shape: "v5e:16x16", "v5p:4x4x8", or Google's name of a slice, as for `topology_name`; for GPUs
        the number of GPUs in a host and of hosts: "h100:8", "h100:8x32".

    Raises:
      ValueError: there is no such version, or it is not offered in this shape; lists similar ones.
    """
    version, _, text = topology_name(name).partition(":")
    known = (*TPUS, *GPUS)
    if version not in known:
        # "v5litepod-256" and "v5e-256" are names of the same thing by the number of chips.
        near = difflib.get_close_matches(re.sub(r"litepod|[-_]\d+$", "", version) or version, known, n=3, cutoff=0.4)
        shown = ", ".join(_name(one, (8,) if one in GPUS else TPUS[one].shapes[3]) for one in near or known)
        raise ValueError(
            f"no topology {name!r}: {version or 'nothing'!r} is none of {', '.join(known)}; write version:shape, "
            f"{'such as' if near else 'one of'} {shown}"
        )
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ValueError(f"no topology {name!r}: write {version}:shape, such as {', '.join(_near(version, text))}")
    shape = tuple(int(size) for size in text.split("x"))
    if not _is_known(version, shape):
        chips = TPUS[version].chips if version in TPUS else math.inf
        most = f"; {version} has at most {chips} chips in a slice; take several slices" * (math.prod(shape) > chips)
        raise ValueError(
            f"no topology {name!r}: {version} is not rented as {text}{most}; near it are "
            f"{', '.join(_near(version, text))}"
        )
    return Topology(version, shape if not (version in GPUS and len(shape) == 1) else (*shape, 1))


def topology_name(name: str) -> str:
    """Convert Google's name of a slice, such as "v5p-512", to version:shape; return other names unchanged.

    v5e and v6e slices are named by chips, v4 and v5p slices by TensorCores, of which a chip has two; the shape is the
    nearest to a cube (cloud.google.com/tpu/docs/v5p, "Available configurations").

    >>> topology_name("v5p-512"), topology_name("v5litepod-256"), topology_name("v5e:4x4")
    ('v5p:4x8x8', 'v5e:16x16', 'v5e:4x4')
    """
    name = name.strip().lower()
    found = re.fullmatch(r"(v4|v5litepod|v5e|v5p|v6e)-(\d+)", name)
    if found is None:
        return name
    version = "v5e" if found[1] == "v5litepod" else found[1]
    chips = int(found[2]) // (2 if version in ("v4", "v5p") else 1)
    shapes = [shape for shape in _shapes(version) if math.prod(shape) == chips]
    best = min(shapes, key=lambda shape: max(shape) - min(shape), default=None)
    return name if best is None else _name(version, best)


def chip_named(name: str) -> Chip:
    """Look up a chip by the name of its topologies, such as "v5e" or "h100", or by its `device_kind`.

    Raises:
      ValueError: there is no such chip; lists similar names.
    """
    cores = TPUS[name.lower()].num_cores if name.lower() in TPUS else None
    found = chip_of(name, num_cores=cores)
    if found is None:
        near = difflib.get_close_matches(name.lower(), KINDS, n=3, cutoff=0.4) or KINDS
        raise ValueError(f"there is no chip {name!r}; use one of {', '.join(near)}")
    return found


def mesh_chip(mesh: Mesh) -> Chip | None:
    """Return the `Chip` with the limits of a mesh's devices; None if the kind of device is not known."""
    device = mesh.devices.flat[0]
    return chip_of(device.device_kind, num_cores=getattr(device, "num_cores", None))


def planned_devices(name: str, *, num_slices: int = 1) -> list[PlannedDevice]:
    """Make the planned devices of a topology.

    Args:
      name: as for `parse_topology`. The GPUs of a host have the same `slice_index`, since NVLink ends at the host.
      num_slices: the number of TPU slices, connected by the data center's network.

    Raises:
      ValueError: as `parse_topology`; or several slices of GPUs, or too many chips.

    Example:
        >>> len(planned_devices("v5e:4x4")), planned_devices("v5e:4x4")[0].device_kind
        (16, 'TPU v5 lite')
    """
    topology = parse_topology(name)
    if not 1 <= num_slices <= MOST_LISTED // math.prod(topology.shape):
        raise ValueError(f"{name}: num_slices must be at least 1, of {MOST_LISTED} chips in all, got {num_slices}")
    if topology.is_gpu:
        if num_slices > 1:
            gpus, hosts = topology.shape
            more = f"{topology.version}:{gpus}x{hosts * num_slices}"
            raise ValueError(f"{name}: slices are of TPUs, got num_slices={num_slices}; for more hosts write {more}")
        return list(_gpus(topology))
    return [device for number in range(num_slices) for device in _tpus(topology, number, num_slices)]


def planned_mesh(name: str, /, *, num_slices: int = 1, **axes: int) -> Mesh:
    """Make a mesh with named axes over planned TPUs or GPUs, without hardware and without their compiler.

    Layouts, `js.plan.promise` and `js.plan.predict` work on it. Nothing can be compiled or computed: to compile,
    `topology_mesh` makes a mesh of the compiler's devices in the same order.

    Args:
      name: version and shape, such as "v5e:16x16", "v5p:4x4x8", "h100:8" (one host) or "h100:8x32" (32 hosts).
      num_slices: the number of TPU slices, connected by the data center's network.
      **axes: name and size of each axis; one size may be -1 and takes the remaining devices.

    Returns:
      A mesh of planned devices, with axis types Auto.

    Raises:
      ValueError: no such topology (similar ones are listed), or sizes that do not multiply to its number of devices.

    Example:
        >>> dict(planned_mesh("v5p:2x2x4", data=4, tensor=-1).shape)
        {'data': 4, 'tensor': 4}
    """
    return arrange(name, planned_devices(name, num_slices=num_slices), num_slices, axes)


def _tpus(topology: Topology, number: int, num_slices: int) -> Iterator[PlannedDevice]:
    """Yield the devices of slice `number` with libtpu's ids (first coordinate fastest); a host has 2 x 2 chips."""
    known = TPUS[topology.version]
    shape = (*topology.shape, 1, 1)[:3]
    host = [min(2, shape[0]), min(2, shape[1]), 1]
    hosts = [size // part for size, part in zip(shape, host, strict=True)]
    offset = 100_000 * (number + 1) if num_slices > 1 else 0
    places = itertools.product(*(range(size) for size in reversed(shape)), range(known.cores))
    for index, (z, y, x, core) in enumerate(places):
        here = x // host[0] + hosts[0] * (y // host[1] + hosts[1] * z) + number * math.prod(hosts)
        yield PlannedDevice(
            offset + index, "tpu", known.kind, here, number, (x, y, z), core_on_chip=core, num_cores=known.num_cores,
            topology=str(topology), num_slices=num_slices,
        )  # fmt: skip


def _gpus(topology: Topology) -> Iterator[PlannedDevice]:
    kind, capability, _ = GPUS[topology.version]
    gpus, hosts = topology.shape
    for index in range(gpus * hosts):
        host = index // gpus
        yield PlannedDevice(index, "gpu", kind, host, host, compute_capability=capability, topology=str(topology))


def _is_known(version: str, shape: tuple[int, ...]) -> bool:
    if version in GPUS:
        return len(shape) in (1, 2) and 1 <= shape[0] <= GPUS[version].most and shape[-1] >= 1
    return sorted(shape) in map(sorted, _shapes(version))


def _near(version: str, text: str) -> list[str]:
    """Return the three topologies of a version that are nearest in size to the misspelled shape `text`."""
    wanted = math.prod(int(size) for size in re.findall(r"\d+", text) or [16]) or 1
    best = sorted(_shapes(version), key=lambda shape: abs(math.log(math.prod(shape) / wanted)))[:3]
    return [_name(version, shape) for shape in best]


def _shapes(version: str) -> list[tuple[int, ...]]:
    """Return all slice shapes of a TPU version, such as (4, 4), or examples of (GPUs per host, hosts) for a GPU."""
    if version in GPUS:
        most = GPUS[version].most
        return [(size,) for size in (1, 2, 4, 8, most) if size <= most] + [(min(8, most), 2**k) for k in range(1, 12)]
    known = TPUS[version]
    sides = itertools.combinations_with_replacement(range(4, 4 * known.cubes + 1, 4), 3)
    return [*known.shapes, *(shape for shape in sides if math.prod(shape) <= known.chips)]


def _name(version: str, shape: Sequence[int]) -> str:
    return f"{version}:{'x'.join(map(str, shape))}"
