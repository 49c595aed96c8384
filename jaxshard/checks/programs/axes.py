"""Make the mesh of a program that is given as text, and infer from the name of each axis what it splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxshard.core.bounds import MOST_LISTED
from jaxshard.core.mesh import solve_sizes

ROWS, EXCHANGED, STAGES, SPLIT = "rows", "rows and exchanged activations", "stages", "split weights"
_USES = {
    ROWS: ("data", "fsdp", "fsdp_transpose", "replica", "batch", "dp", "zero", "hsdp", "diloco"),
    EXCHANGED: ("context", "context_heads", "sequence", "seq", "sp", "cp", "ulysses", "expert", "experts", "ep"),
    STAGES: ("pipe", "pipeline", "stage", "stages", "pp"),
    SPLIT: ("tensor", "model", "tp", "mp", "mdl", "tensor_transpose", "tensor_sequence", "autoregressive"),
}


@dataclass(frozen=True)
class Position:
    """Stands for a device in the mesh of a program that is given only as HLO text.

    Attributes:
      id: the index of the device in `mesh.devices.flat`.
      slice_index: the number of the TPU slice.
      platform: always "text".
      process_index: always 0.
    """

    id: int
    slice_index: int = 0
    platform: str = "text"
    process_index: int = 0


def position_mesh(axes: dict[str, int], devices: int, *, slices: bool = False) -> Mesh:
    """Make the mesh of a program that is given only as HLO text; a `Position` stands for each of its devices.

    The devices are numbered in row-major order of the mesh, as in the program.

    Args:
      axes: name and size of each axis; one size may be -1.
      devices: the number of devices of the program; if there are several TPU slices, the number in one slice.
      slices: True if the program communicates with other slices; then the mesh may be a multiple of `devices`.

    Raises:
      ValueError: the product of the sizes is not the number of devices, or there are too many devices to list.
    """
    known = math.prod(axes.values())  # negative with a size that is to be found
    total = known if slices and known > 0 and known % devices == 0 else devices
    try:
        sizes = solve_sizes(axes, total)
    except ValueError as error:
        more = ", or a multiple for its slices" if slices else ""
        raise ValueError(
            f"--mesh {','.join(f'{name}={size}' for name, size in axes.items())}: the file's program is for {devices} "
            f"devices{more} (num_partitions times replica_count of its first line); give the mesh that it was compiled "
            "for"
        ) from error
    if total > MOST_LISTED:
        raise ValueError(f"the program is for {total} devices, and at most {MOST_LISTED} can be listed")
    positions = np.array([Position(number, number // devices) for number in range(total)], dtype=object)
    return Mesh(positions.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def axes_for(mesh: Mesh, *uses: str) -> tuple[str, ...]:
    """Return the mesh axes larger than 1 whose names tell one of `uses`, such as rows (see `use_of`), in mesh order."""
    return tuple(name for name, size in mesh.shape.items() if size > 1 and use_of(name) in uses)


def use_of(name: str) -> str | None:
    """Infer from the name of a mesh axis what it splits, such as rows or weights; None if the name does not tell.

    Digits at the end, "ici_", "dcn_" and "_parallelism" are ignored: "ici_fsdp_parallelism" is read as "fsdp".
    """
    plain = name.lower().removeprefix("ici_").removeprefix("dcn_").removesuffix("_parallelism").rstrip("0123456789_")
    return next((use for use, names in _USES.items() if plain in names), None)


def check_axes(mesh: Mesh, strategy: str) -> None:
    """Raise ValueError if the name of a mesh axis larger than 1 does not tell what the axis splits."""
    unknown = [name for name, size in mesh.shape.items() if size > 1 and use_of(name) is None]
    if unknown:
        listed = "; ".join(f"{', '.join(names)} for {use}" for use, names in _USES.items())
        raise ValueError(
            f"--strategy {strategy}: the name of the axis {unknown[0]!r} does not tell what it splits. Names in --mesh "
            f"are yours to choose: {listed}"
        )


def words(axes: Sequence[str]) -> str:
    """Join the names of axes: "data and expert"; "no axis" if there are none."""
    return " and ".join(axes) or "no axis"
