"""Group equal matrices into stacks and assign each matrix to a device, balanced by the FLOPs of the updates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, axes_of
from jaxshard.optim.owners.cores import Core, TracedUpdate
from jaxshard.optim.owners.flops import product_flops
from jaxshard.optim.owners.owners import OwnedStack
from jaxshard.proofs.alike import same_programs


class Matrix(NamedTuple):
    """The matrices of one parameter, which are assigned to devices: the array itself, or the slices of a stacked array.

    Attributes:
      path: the path of the parameter.
      core: the core of the parameter's update, that is, the operations that need the full matrix.
      program: the jaxpr of the core for a single matrix; `core.program` if the array is a single matrix.
      slices: the number of matrices that the parameter stacks along its first dimension; 0 for a single matrix.
      sliced: for each element of `core.shared` (inputs that every device has), True if it has an entry for each slice.
      placement: the placement of the parameter in the optimizer.
    """

    path: str
    core: Core
    program: Any
    slices: int
    sliced: tuple[bool, ...]
    placement: Placement


class Group(NamedTuple):
    """Matrices of equal shape and placement whose updates run the same program.

    Attributes:
      matrices: one `Matrix` per parameter; it may stand for all slices of a stacked array.
      common: for each element of `core.shared` (inputs such as the step count), True if all parameters read the same
        value.
    """

    matrices: tuple[Matrix, ...]
    common: tuple[bool, ...]

    @property
    def size(self) -> int:
        return sum(one.slices or 1 for one in self.matrices)


def group(made: TracedUpdate, matrices: Sequence[Matrix]) -> list[Group]:
    """Group the matrices that have equal shapes and placements and are updated by the same program."""
    groups: list[list[Matrix]] = []
    for one in matrices:
        like = next((members for members in groups if _alike(members[0], one)), None)
        if like is None:
            groups.append([one])
        else:
            like.append(one)
    return [Group(tuple(members), _common(made, members)) for members in groups]


def _alike(one: Matrix, other: Matrix) -> bool:
    def facts(matrix: Matrix) -> Any:
        place, core = matrix.placement, matrix.core
        kinds = [(tuple(x.aval.shape), x.aval.dtype) for x in (*core.ins, *core.outs)]
        return matrix.slices, matrix.sliced, place.view, place.store, kinds, len(core.ins), len(core.states)

    return facts(one) == facts(other) and same_programs(one.program, other.program)


def _common(made: TracedUpdate, members: Sequence[Matrix]) -> tuple[bool, ...]:
    """Return, for each input that every device has, True if it has the same value for all members of a group.

    The inputs are `core.shared`, such as step counts. They have the same value if they are the same jaxpr variable or
    equal constants.
    """
    constants = dict(zip(made.jaxpr.invars, made.consts))

    def same(x: Any, y: Any) -> bool:
        if x is y:
            return True
        return x in constants and y in constants and bool(np.array_equal(constants[x], constants[y]))

    columns = zip(*(one.core.shared for one in members), strict=True)
    return tuple(all(same(column[0], x) for x in column) for column in columns)


def assign(groups: Sequence[Group], mesh: Mesh) -> list[OwnedStack]:
    """Assign every matrix to a device: the most expensive first, each to the device with the fewest FLOPs so far.

    No device owns more than twice its even share of a group, because every device has as many slots for matrices as the
    device that owns the most, and empty slots cost memory and communication, too.
    """
    costs = [product_flops(one.matrices[0].program) for one in groups]
    loads: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}
    stacks = []
    for cost, one in sorted(zip(costs, groups, strict=True), key=lambda pair: -pair[0]):
        first = one.matrices[0]
        axes = axes_of(first.placement.store)
        devices = axis_size(mesh, axes)
        # (FLOPs, matrices, device): among devices with equal FLOPs, those with the fewest matrices come first.
        heap = loads.setdefault(axes, [(0, 0, device) for device in range(devices)])
        counts = [0] * devices
        # Every device has as many slots as the device with the most matrices, and empty slots are sent too.
        full, most = [], 2 * -(-one.size // devices)
        for _ in range(one.size):
            load, held, device = heapq.heappop(heap)
            counts[device] += 1
            busier = load + cost, held + 1, device
            if counts[device] < most:
                heapq.heappush(heap, busier)
            else:
                full.append(busier)
        for busier in full:
            heapq.heappush(heap, busier)
        slots = max(counts)
        places = tuple(device * slots + slot for device, held in enumerate(counts) for slot in range(held))
        core = first.core
        goes, returns = (tuple(str(x.aval.dtype) for x in moved if x.aval.shape) for moved in (core.ins, core.outs))
        shape = first.placement.view.logical[1 if first.slices else 0 :]
        stacks.append(
            OwnedStack(
                paths=tuple(matrix.path for matrix in one.matrices),
                leaves=tuple(matrix.core.leaf for matrix in one.matrices),
                slices=first.slices,
                shape=shape,
                axes=axes,
                devices=devices,
                slots=slots,
                places=places,
                states=tuple(zip(*(matrix.core.states for matrix in one.matrices), strict=True)),
                moved=(goes, returns),
                flops=cost,
            )
        )
    return stacks
