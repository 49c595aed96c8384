"""Replica groups of a collective, and the mesh axes that they stand for.

A compiled collective names the devices that talk to each other by their positions in `mesh.devices.flat`. On a mesh
(x=2, y=4) whose positions are

    x=0:  0 1 2 3
    x=1:  4 5 6 7

the groups `{{0,1,2,3},{4,5,6,7}}` communicate over y, `{{0,4},{1,5},{2,6},{3,7}}` over x, all eight over (x, y).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

Groups = tuple[tuple[int, ...], ...]
"""Groups of positions in `mesh.devices.flat`; of a permute, pairs of source and target."""

UNKNOWN = ("?",)
"""The axes of groups that are no product of mesh axes."""

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([^',]+?)'?(?::\((\d+)\)(\d+))?")


def parse_groups(text: str, devices: int) -> Groups:
    """Parse what stands behind `replica_groups=`, in any of its three syntaxes.

        {{0,1},{2,3}}                     explicit; {} means all devices together
        [4,2]<=[2,4]T(1,0)                iota: count to 8, reshape to 2 x 4, transpose, reshape to 4 groups of 2
        mesh['a'=2,'b'=4] {'b':(2)2}      mesh-shaped: the devices, in row-major order or as `device_ids` says, grouped
                                          over the named axes; b:(2)2 is the inner 2 of an axis of 4 split in 2 x 2

    Args:
      text: of the attribute; what follows after it is ignored.
      devices: how many devices the program runs on.

    Raises:
      ValueError: a syntax that is none of these.
    """
    if text.startswith("{"):
        groups = re.findall(r"\{([\d,]+)\}", text)
        return tuple(_integers(group) for group in groups) or (tuple(range(devices)),)
    if iota := _IOTA.match(text):
        return tuple(tuple(group) for group in _expand_iota(iota).tolist())
    if mesh := _MESH.match(text):
        return _expand_mesh(*mesh.groups())
    raise ValueError(f"replica groups in an unknown syntax: {text[:120]!r}")


def _expand_iota(found: re.Match[str]) -> np.ndarray:
    ids = np.arange(math.prod(_integers(found[2]))).reshape(_integers(found[2]))
    if found[3]:
        ids = ids.transpose(_integers(found[3]))
    return ids.reshape(_integers(found[1]))


def _expand_mesh(shape: str, device_ids: str | None, axes: str) -> Groups:
    """Groups over whole axes, or over parts of axes, of a mesh that the compiler describes.

    `mesh[a=2,b=4] {b:(2)2}` splits b into 2 x 2 and groups over the inner part: the devices, reshaped to [2, 2, 2] and
    the grouped dimension moved to the end, are read off as rows: {0,1}, {2,3}, {4,5}, {6,7}.
    """
    names, sizes = [], []
    for axis in shape.split(",") if shape else ():
        name, _, size = axis.rpartition("=")
        names.append(name.strip().strip("'"))
        sizes.append(int(size))
    # Every named axis, whole or in part, becomes dimensions of its own; the parts named in `axes` are grouped over.
    split: list[list[int]] = [[size] for size in sizes]
    wanted: dict[int, list[tuple[int, int]]] = {}
    for axis in axes.split(",") if axes else ():
        found = _AXIS.fullmatch(axis.strip())
        if found is None or found[1] not in names:
            raise ValueError(f"replica groups over {axis!r}, which is no axis of mesh[{shape}]")
        index = names.index(found[1])
        part = (int(found[2]), int(found[3])) if found[2] else (1, sizes[index])
        wanted.setdefault(index, []).append(part)
    grouped: list[tuple[int, int]] = []
    for index, parts in wanted.items():
        split[index], taken = _split_axis(sizes[index], parts)
        grouped += [(index, position) for position in taken]
    dims = [(index, position) for index, parts in enumerate(split) for position in range(len(parts))]
    order = [dims.index(dim) for dim in dims if dim not in grouped] + [dims.index(dim) for dim in grouped]
    shape_of = [size for parts in split for size in parts]
    ids = _device_ids(device_ids, math.prod(sizes)).reshape(shape_of).transpose(order)
    width = math.prod(split[index][position] for index, position in grouped)
    return tuple(tuple(group) for group in ids.reshape(-1, width).tolist())


def _split_axis(size: int, parts: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The sizes into which an axis falls, major first, and which of these are the parts.

    A part is given as (size before it, its own size): of an axis of 8, the part (2, 2) gives [2, 2, 2] and [1].
    """
    bounds = sorted({1, size, *(before for before, _ in parts), *(before * part for before, part in parts)})
    sizes = [after // before for before, after in itertools.pairwise(bounds)] or [1]
    taken = [bounds.index(start) for start in bounds[:-1] if any(b <= start < b * n for b, n in parts)]
    return sizes, taken


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    if not text.startswith("["):
        return np.array(_integers(text))
    shape, _, order = text[1:].partition("]")
    ids = np.arange(count).reshape(_integers(shape))
    return ids.transpose(_integers(order[2:-1])) if order else ids


def parse_pairs(text: str) -> Groups:
    """Parse the (source, target) pairs behind `source_target_pairs=`, such as `{{0,1},{1,2}}`."""
    return tuple(_integers(pair) for pair in re.findall(r"\{([\d,]+)\}", text))


def axes_of_groups(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Find the mesh axes over which groups of devices communicate.

    Args:
      groups: of positions in `mesh.devices.flat`, in any order.
      mesh: the mesh of the program.

    Returns:
      The axes in mesh order, those of size 1 never; `UNKNOWN` where the groups are no product of whole axes; () where
      every device is a group of its own.
    """
    # Every device gets the lowest position of its group as label. Groups over some axes are the right ones if taking
    # the minimum of the positions along these axes gives the same labels.
    labels = np.arange(mesh.size)
    for group in groups:
        labels[list(group)] = min(group)
    ids = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    names = [name for name, size in mesh.shape.items() if size > 1]
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            dims = tuple(mesh.axis_names.index(name) for name in axes)
            lowest = ids.min(axis=dims, keepdims=True) if dims else ids
            if np.array_equal(np.broadcast_to(lowest, ids.shape).ravel(), labels):
                return axes
    return UNKNOWN


def axes_of_pairs(pairs: Groups, mesh: Mesh) -> tuple[str, ...]:
    """Find the mesh axes, in mesh order, along which any source of a permute differs from its target."""
    shape = tuple(mesh.shape.values())
    moved = np.array([np.subtract(np.unravel_index(a, shape), np.unravel_index(b, shape)) for a, b in pairs])
    return tuple(name for dim, name in enumerate(mesh.axis_names) if len(pairs) and moved[:, dim].any())


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
