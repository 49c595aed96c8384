"""Estimate the time of collectives: latency and bandwidth on a torus, in islands of GPUs, and on the network outside.

An all-gather of B bytes over a ring of n devices moves B (n - 1) / n bytes into each device, half from either side.
With links of W bytes per second in each direction that takes B (n - 1) / (2 W n) seconds, and the latency of n / 2
hops. A line, which is a dimension of the torus without wrap-around links, has one link at its ends and takes
B (n - 1) / (W n) seconds. Over several dimensions of a torus all links are used. A reduce-scatter takes as long as the
all-gather of its result, an all-reduce as long as both.

Over k slices, or islands of GPUs, of m devices each, a device moves its part, B / m, between them: B (k - 1) / (k m)
bytes through its own port.

Sources: jax-ml.github.io/scaling-book/sharding (rings, lines, several dimensions, all-to-all), NVIDIA's nccl-tests,
doc/PERFORMANCE.md (bus bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.promise import Promise
from jaxshard.core.mesh import axis_size, slice_indices
from jaxshard.core.tree import bytes_of
from jaxshard.cost.hardware import Chip, Network

Range = tuple[float, float]
"""A low and a high estimate."""

EFFICIENCY: dict[str, Range] = {
    # The scaling book's links carry 0.9 of Google's figures (tpus.md), an all-gather over a TPU7x:2x2x1 0.89
    # (tpu-recipes, microbenchmarks/ironwood/collectives), an all-reduce over a v6e:16x16 236 of 400 GB/s
    # (tpu-recipes, microbenchmarks/trillium/collectives).
    "ici": (0.9, 0.59),
    # The same table has 4.1 of 12.5 GB/s between two slices of v6e; 0.9 is the share on the links inside.
    "dcn": (0.9, 0.33),
    # All-reduces inside a host: 200 to 235 of 300 GB/s on A100 (NVIDIA/nccl-tests issues 149 and 178).
    "nvlink": (0.78, 0.67),
    # 48 of 64 GB/s per link of MI300X (rocm.blogs.amd.com, mi300x-rccl-xgmi); no slower one was found, so NVLink's.
    "xgmi": (0.75, 0.67),
    # Over 256 GPUs in hosts with 8 ports of 50 GB/s: 340 GB/s and 200 GB/s (NVIDIA/nccl issue 1218).
    "ib": (0.85, 0.5),
}
"""The share of the published bandwidth that collectives reach: at best, and in the slowest public measurement."""


@dataclass(frozen=True)
class CollectiveCost:
    """The bytes and seconds of all collectives of one kind over the same axes in a step.

    Attributes:
      kind: such as "all-gather".
      axes: the mesh axes.
      count: executions per step.
      bytes: bytes that each device receives.
      array_bytes: bytes before an array is scattered or after it is gathered, as `js.plan.summary` counts them.
      seconds: the time of all these collectives one after the other, at best and at worst.
      link: the slowest link that these collectives use: "ici", "dcn", "nvlink", "xgmi" or "ib"; "" on an unknown chip.
      what: the arrays in words.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float
    array_bytes: float
    seconds: Range
    link: str
    what: str


class Group(NamedTuple):
    """The links of the network between the devices of one collective.

    Attributes:
      inside: (size, True if it is a ring) of each dimension of the torus that the devices cover; for GPUs the number of
        devices in an island, as one ring.
      outside: the number of slices or islands to which the devices belong.
    """

    inside: tuple[tuple[int, bool], ...]
    outside: int

    @property
    def members(self) -> int:
        """The number of devices inside one slice or island."""
        return math.prod(size for size, _ in self.inside)


def collective_costs(promise: Promise, mesh: Mesh, chip: Chip | None) -> tuple[CollectiveCost, ...]:
    """Estimate the bytes and seconds of the promised collectives of a step.

    If a compiler may choose between collectives (an all-reduce in place of a reduce-scatter), only the collective that
    the layout implies counts, with the largest number of executions that is promised. Collectives without a promised
    size are not in the result: sums of activations over tensor axes, and exchanges of tokens. `collective_cost`
    estimates a collective of known bytes.

    Args:
      promise: the promise of the step.
      mesh: the mesh; coordinates, slices and ids of its devices tell which links connect them.
      chip: the chip of the mesh; None leaves out the times.

    Returns:
      One cost for all weights, gradients and so on of the same kind and axes, in the promise's order.

    Example:
        mesh = js.plan.planned_mesh("v5e:2x4", data=8)
        promised = js.plan.promise(js.layout(js.fsdp(), mesh, init_fn, tx), js.explicit(), loss_fn, batch)
        sum(cost.seconds[1] for cost in collective_costs(promised, mesh, js.plan.chip("TPU v5e")))
    """
    found: dict[tuple[str, ...], list[CollectiveCost]] = {}
    for one in _chosen(promise.expected):
        assert one.shape is not None and one.most is not None
        size = bytes_of(one.shape, one.dtype)
        cost = collective_cost(one.kind, one.axes, size, mesh, chip, count=one.most, what=one.what)
        word = one.what.split(" ")[0]
        found.setdefault((one.kind, *one.axes, word), []).append(cost)
    return tuple(join_costs(costs) for costs in found.values())


def collective_cost(
    kind: str,
    axes: Sequence[str],
    size: float,
    mesh: Mesh,
    chip: Chip | None,
    *,
    count: int = 1,
    what: str = "",
) -> CollectiveCost:
    """Estimate the bytes and seconds of a collective over mesh axes.

    Args:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all" or "collective-permute".
      axes: the mesh axes.
      size: bytes of the array: of the gathered array, of the array before it is scattered, or of the summed array; for
        an all-to-all or a permute, of the array on one device.
      mesh: the mesh.
      chip: the chip of the mesh; None leaves out the time.
      count: how often it runs.
      what: the array in words.

    Returns:
      The cost of all `count` executions, for one device.

    Example:
      cost = js.plan.collective_cost("all-gather", ("data",), 2**30, mesh, js.plan.chip("TPU v5e"))
    """
    axes = tuple(axes)
    devices = axis_size(mesh, axes)
    share = 1.0 if kind == "collective-permute" else (devices - 1) / devices
    moved = size * share * (2 if kind == "all-reduce" else 1)
    seconds, link = (0.0, 0.0), ""
    if chip is not None and chip.network is not None and devices > 1:
        group = group_of(mesh, axes, chip.network)
        low, high = collective_seconds(kind, size, group, chip.network)
        seconds = (count * low, count * high)
        link = chip.network.outside if group.outside > 1 else chip.network.inside
    return CollectiveCost(kind, axes, count, count * moved, count * size, seconds, link, what)


def group_of(mesh: Mesh, axes: Sequence[str], network: Network) -> Group:
    """Return how the network connects the devices of a collective over mesh axes.

    If the network is a torus and the devices have no coordinates, they count as a line.
    """
    dims = [mesh.axis_names.index(axis) for axis in axes]
    others = tuple(0 if dim not in dims else slice(None) for dim in range(mesh.devices.ndim))
    line = list(np.asarray(mesh.devices[others]).flat)
    if network.island:
        islands = len({device.id // network.island for device in line})
        return Group(((len(line) // islands, True),), islands)
    places = slice_indices(mesh)
    slices = len(set(np.asarray(places[others]).flat))
    everywhere = [device.coords for device in mesh.devices.flat if hasattr(device, "coords")]
    if len(everywhere) < mesh.size:
        return Group(((len(line) // slices, False),), slices)
    torus = _extents(everywhere)
    closed = network.closed(torus[: network.dims])
    reached = _extents([device.coords for device in line])
    inside = tuple(
        (size, dim < len(closed) and closed[dim] and size == torus[dim]) for dim, size in enumerate(reached) if size > 1
    )
    return Group(inside, slices)


def _extents(places: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many different coordinates the devices have along each dimension: the extent of their torus."""
    return tuple(len(set(along)) for along in zip(*places, strict=True))


def collective_seconds(kind: str, size: float, group: Group, network: Network) -> Range:
    """Return the seconds of one collective, at best and at worst.

    At best the links inside slices (or islands) and between them are used at the same time, at worst one after the
    other; `EFFICIENCY` has the share of the bandwidth that links reach. Over an axis that covers several dimensions of
    a torus TPUs have no reduce-scatter: at worst an all-reduce replaces it.

    Args:
      kind: as for `collective_cost`.
      size: as for `collective_cost`.
      group: how the devices of the collective are connected.
      network: the links between them.
    """
    inside, outside = _inside(kind, size, group, network), _outside(kind, size, group, network)
    steps = {"all-reduce": 2}.get(kind, 1)
    hops = sum(extent // 2 if closed else extent - 1 for extent, closed in group.inside)
    latency = steps * ((1 if network.island else hops) * network.latency if group.members > 1 else 0.0)
    latency += steps * math.ceil(math.log2(group.outside)) * network.outside_latency
    (inside_low, inside_high), (outside_low, outside_high) = EFFICIENCY[network.inside], EFFICIENCY[network.outside]
    worst = 2 if kind == "reduce-scatter" and len(group.inside) > 1 else 1
    low = max(inside / inside_low, outside / outside_low)
    return low + latency, worst * inside / inside_high + outside / outside_high + latency


def _inside(kind: str, size: float, group: Group, network: Network) -> float:
    """Return the seconds that a collective takes on the links inside slices or islands, at full bandwidth."""
    count, width = group.members, network.bandwidth
    if count == 1:
        return 0.0
    if kind == "collective-permute":
        return size / width
    moved = size * (count - 1) / count
    exchanges = kind in ("all-to-all", "ragged-all-to-all")
    if network.island:
        return moved * (2 if kind == "all-reduce" else 1) / width
    if exchanges:
        # Half of the devices send half of their data over the middle of the longest dimension.
        return max(size * extent / (4 * (2 if closed else 1) * width) for extent, closed in group.inside)
    links = sum(2 if closed else 1 for _, closed in group.inside)
    return moved * (2 if kind == "all-reduce" else 1) / (links * width)


def _outside(kind: str, size: float, group: Group, network: Network) -> float:
    """Return the seconds that a collective takes on the links between slices or islands, at full bandwidth."""
    if group.outside == 1:
        return 0.0
    if kind == "collective-permute":
        return size / network.outside_bandwidth
    share = (group.outside - 1) / group.outside
    if kind in ("all-to-all", "ragged-all-to-all"):
        return size * share / network.outside_bandwidth
    return size / group.members * share * (2 if kind == "all-reduce" else 1) / network.outside_bandwidth


def _chosen(expected: Iterable[Expected]) -> Iterator[Expected]:
    """Yield the promised collectives whose costs are estimated.

    If a compiler may choose between several collectives, such as a reduce-scatter and an all-reduce, only the
    collective that the layout implies is yielded.
    """
    sure = [one for one in expected if one.is_counted and one.limit is None and not one.pooled]
    yield from sure
    scattered_singly = {one.what for one in sure if one.kind == "reduce-scatter"}
    forms: dict[tuple[str, tuple[int, ...]], list[Expected]] = {}
    for one in expected:
        if one.pooled and one.axes and one.shape is not None and one.instead_of in ("", one.what):
            forms.setdefault((one.what, one.shape), []).append(one)
    # Between slices a promise does not tell a sum from a scattered sum: if weights are gathered, it is scattered.
    scattered = any(one.what.startswith(("weight", "new parameter")) for one in expected)
    sums = "reduce-scatter" if scattered else "all-reduce"
    for (what, _), ones in forms.items():
        # The forms of one collective over all axes that cross slices.
        kind = sums if what.startswith("gradient") else "all-gather"
        kind = kind if len({one.kind for one in ones}) > 1 else ones[0].kind
        axes = tuple(dict.fromkeys(axis for one in ones for axis in one.axes))
        if kind != "reduce-scatter" or len(axes) == 1 or what not in scattered_singly:
            yield replace(ones[0], kind=kind, axes=axes)


def join_costs(costs: Sequence[CollectiveCost]) -> CollectiveCost:
    """Add up the costs of several collectives of the same kind over the same axes."""
    words = costs[0].what if len(costs) == 1 else f"{costs[0].what} and {len(costs) - 1} more"
    return CollectiveCost(
        costs[0].kind,
        costs[0].axes,
        sum(one.count for one in costs),
        sum(one.bytes for one in costs),
        sum(one.array_bytes for one in costs),
        (sum(one.seconds[0] for one in costs), sum(one.seconds[1] for one in costs)),
        costs[0].link,
        words,
    )
