"""Parse the replica groups of a collective, and find the mesh axes over which they communicate.

A compiled collective names the devices that talk to each other by their positions in `mesh.devices.flat`. On a mesh
(x=2, y=4) whose positions are

    x=0:  0 1 2 3
    x=1:  4 5 6 7

the groups `{{0,1,2,3},{4,5,6,7}}` communicate over y, `{{0,4},{1,5},{2,6},{3,7}}` over x, all eight over (x, y).

A program for several TPU slices is written for one slice. Its positions count the devices of that slice, in mesh order:
if x = 2 above were two slices, the groups `{{0,1,2,3}}` would mean both groups over y.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxshard.core.bounds import MOST_LISTED
from jaxshard.core.mesh import axis_size, slice_indices
from jaxshard.hlo import hlo
from jaxshard.hlo.transfers import is_transfer, names_all_slices

Groups = tuple[tuple[int, ...], ...]
"""Groups of positions in `mesh.devices.flat`; of a permute, pairs of source and target."""

UNKNOWN = ("?",)
"""The axes of groups that are not a product of mesh axes."""

_LISTED = re.compile(r"\{(?:\{[\d,]+\},?)*\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IOTA_GROUPS = re.compile(rf"\[([\d,]+)\]<={_IOTA.pattern}")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_SIZE = re.compile(r"\s*'?([^',=\s]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',]+?)'?(?::\((\d+)\)(\d+))?")


def find_groups(scope: hlo.Scope, op: hlo.Op, mesh: Mesh) -> tuple[Groups, tuple[str, ...]]:
    """Return (the groups of devices that a collective connects, the mesh axes over which it communicates).

    Groups, or (source, target) pairs of a permute, are positions in `mesh.devices.flat`.
    """
    slices = slice_indices(mesh)
    if is_transfer(op):
        groups = groups_across_slices(slices)
        axes = covering_axes(groups, mesh)
        # A transfer among some of the slices does not say which.
        return groups, axes if len(axes) == 1 or names_all_slices(op) else UNKNOWN
    groups, of_one_slice = groups_of(op, scope.module), scope.module.devices < mesh.size
    if of_one_slice:
        groups = groups_on_slices(groups, slices)
    # Groups of one slice cover only the part of an axis that is inside it.
    find = covering_axes if of_one_slice or op.opcode.startswith("collective-permute") else axes_of_groups
    return groups, find(groups, mesh)


def groups_of(op: hlo.Op, module: hlo.Module) -> Groups:
    """Parse the groups of a collective, or the (source, target) pairs of a permute, as positions of devices."""
    name = "source_target_pairs" if op.opcode.startswith("collective-permute") else "replica_groups"
    text = op.attributes.partition(f" {name}=")[2] or "{}"
    groups = _parse_pairs(text) if name == "source_target_pairs" else parse_groups(text, module.devices)
    if wrong := [at for group in groups for at in group if at >= module.devices]:
        raise ValueError(f"{name} of %{op.name} name the device {wrong[0]}, and the program has {module.devices}")
    return groups


def parse_groups(text: str, devices: int) -> Groups:
    """Parse the value of `replica_groups=`, in any of its three syntaxes.

        {{0,1},{2,3}}                     explicit; {} means all devices together
        [4,2]<=[2,4]T(1,0)                iota: count to 8, reshape to 2 x 4, transpose, reshape to 4 groups of 2
        mesh['a'=2,'b'=4] {'b':(2)2}      mesh-shaped: the devices, in row-major order or as `device_ids` says, grouped
                                          over the named axes; b:(2)2 is the inner 2 of an axis of 4 split in 2 x 2

    Args:
      text: the value; anything after it is ignored.
      devices: how many devices the program runs on.

    Raises:
      ValueError: a syntax that is none of these, or sizes of more devices than can be listed.
    """
    if text.startswith("{"):
        return _parse_pairs(text) or (tuple(range(devices)),)
    if iota := _IOTA_GROUPS.match(text):
        return _as_groups(expand_iota(iota[2], iota[3]).reshape(_integers(iota[1])))
    if mesh := _MESH.match(text):
        return _expand_mesh(*mesh.groups())
    raise ValueError(f"replica groups in an unknown syntax: {text[:120]!r}")


def _count_devices(sizes: Iterable[int]) -> int:
    """Multiply sizes; raise ValueError if there are more devices than a program can have."""
    if (count := math.prod(sizes)) > MOST_LISTED:
        raise ValueError(f"replica groups of {count} devices, and at most {MOST_LISTED} can be read")
    return count


def _expand_mesh(shape: str, device_ids: str | None, axes: str) -> Groups:
    """Return the groups that the mesh-shaped syntax of `parse_groups` describes, `mesh[shape], device_ids {axes}`.

    Devices are in the same group if they differ only along the named axes. `b:(2)2` names a part of an axis: b=4 is
    split in 2 x 2, and the part is the second factor. So `mesh[a=2,b=4] {b:(2)2}` has the groups {0,1}, {2,3}, {4,5},
    {6,7}.
    """
    given = [_SIZE.fullmatch(axis) for axis in shape.split(",")]
    sizes = {axis[1]: int(axis[2]) for axis in given if axis is not None}
    if len(sizes) < len(given):
        raise ValueError(f"replica groups of a mesh that can't be read: mesh[{shape[:120]}]")
    count = _count_devices(sizes.values())
    places = dict(zip(sizes, np.unravel_index(np.arange(count), tuple(sizes.values())))) if sizes else {}
    digits = [np.zeros(count, int)]
    width = 1
    for axis in axes.split(",") if axes else ():
        found = _AXIS.fullmatch(axis.strip())
        if found is None or found[1] not in sizes:
            raise ValueError(f"replica groups over {axis!r}, which is no axis of mesh[{shape}]")
        before, part = (int(found[2]), int(found[3])) if found[2] else (1, sizes[found[1]])
        after = sizes[found[1]] // (before * part)
        digits.append(places[found[1]] // after % part)
        places[found[1]] = places[found[1]] - digits[-1] * after
        width *= part
    order = np.lexsort((*reversed(digits), *reversed(places.values())))  # sorted by place, in a group by digits
    return _as_groups(_device_ids(device_ids, count)[order].reshape(-1, width))


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    iota = _IOTA.match(text)
    return np.array(_integers(text)) if iota is None else expand_iota(*iota.groups()).ravel()


def expand_iota(sizes: str, order: str | None) -> np.ndarray:
    """Return the integers 0, 1, ... in an array of these sizes, then transposed by `order`, if given.

    >>> expand_iota("2,3", "1,0").tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    ids = np.arange(_count_devices(_integers(sizes))).reshape(_integers(sizes))
    return ids.transpose(_integers(order)) if order else ids


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))


def _parse_pairs(text: str) -> Groups:
    """Parse groups or (source, target) pairs in braces, such as `{{0,1},{1,2}}`."""
    listed = _LISTED.match(text)
    if listed is None:
        raise ValueError(f"groups of devices that can't be read: {text[:120]!r}")
    return tuple(_integers(pair) for pair in re.findall(r"\{([\d,]+)\}", listed[0]))


def axes_of_groups(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Find the mesh axes over which groups of devices communicate.

    Args:
      groups: groups of positions in `mesh.devices.flat`, in any order.
      mesh: the mesh of the program.

    Returns:
      The axes in mesh order, without those of size 1; `UNKNOWN` if the groups are not a product of axes; () if every
      device is a group of its own.
    """
    axes = covering_axes(groups, mesh)
    width = axis_size(mesh, axes)
    is_product = len(groups) * width == mesh.size and all(len(group) == width for group in groups)
    return axes if is_product else UNKNOWN


def groups_on_slices(groups: Groups, slices: np.ndarray) -> Groups:
    """Repeat the groups of one slice for each slice, as positions in the mesh.

    >>> groups_on_slices(((0, 1),), np.array([[0, 1], [0, 1]]))
    ((0, 2), (1, 3))

    Args:
      groups: groups of positions among the devices of one slice.
      slices: the slice number of each device, in the shape of the mesh.
    """
    return tuple(tuple(int(own[at]) for at in group) for own in slice_members(slices) for group in groups)


def slice_members(slices: np.ndarray) -> np.ndarray:
    """Return the mesh positions of each slice's devices, one row per slice.

    >>> slice_members(np.array([[0, 1], [0, 1]])).tolist()
    [[0, 2], [1, 3]]
    """
    return np.stack([np.flatnonzero(slices.ravel() == number) for number in np.unique(slices)])


def groups_across_slices(slices: np.ndarray) -> Groups:
    """Return groups of the devices that have the same position in their slices.

    >>> groups_across_slices(np.array([[0, 1], [0, 1]]))
    ((0, 1), (2, 3))
    """
    return _as_groups(slice_members(slices).T)


def covering_axes(groups: Iterable[Sequence[int]], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes, in mesh order, along which any two devices of the same group (or pair) differ."""
    pairs = [(group[0], other) for group in groups for other in group]
    places = np.unravel_index(np.array(pairs, int).reshape(-1, 2), tuple(mesh.shape.values()))
    return tuple(name for name, place in zip(mesh.axis_names, places) if (place[:, 0] != place[:, 1]).any())


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
