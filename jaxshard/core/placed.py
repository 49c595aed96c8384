"""Arrays of a layout with their placements, and their bytes per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.tree import Leaf
from jaxshard.core.types import Role


class Placed(NamedTuple):
    """One array of a layout in one role.

    Attributes:
      role: "param", "grad", "opt" or "state".
      leaf: the array's path, logical shape, dtype and names of dimensions.
      placement: the array's placement.
    """

    role: Role
    leaf: Leaf
    placement: Placement


def bytes_by_role(placed: Sequence[Placed], mesh: Mesh) -> dict[Role, int]:
    """Return the bytes of the stored arrays on one device by role: "param", "grad", "opt" and "state".

    Arrays in the host's memory are not included (`bytes_on_host`).
    """
    total: dict[Role, int] = {"param": 0, "grad": 0, "opt": 0, "state": 0}
    for role, leaf, placement in placed:
        total[role] += 0 if placement.memory else placement.bytes_per_device(mesh, leaf.dtype)
    return total


def bytes_on_host(placed: Sequence[Placed], mesh: Mesh) -> int:
    """Return the bytes per device of the arrays in the host's memory."""
    return sum(p.bytes_per_device(mesh, leaf.dtype) for _, leaf, p in placed if p.memory)


def split_share(placed: Sequence[Placed], mesh: Mesh, role: Role) -> float:
    """Return the fraction, from 0 to 1, of a role's elements that are in arrays split over more than one device."""
    of_role = [one for one in placed if one.role == role]
    split = sum(one.leaf.size for one in of_role if _is_split(one.placement, mesh))
    return split / max(1, sum(one.leaf.size for one in of_role))


def _is_split(placement: Placement, mesh: Mesh) -> bool:
    return bool(placement.owned) or any(mesh.shape[axis] > 1 for axis in axes_of(placement.store))
