"""Owners: the device that updates each matrix, and the stacks in which the matrices' optimizer state is stored.

An optimizer such as Shampoo multiplies matrices in every step. If its state is split over devices, every device would
have to gather every matrix. Instead, matrices of equal shape form a stack, and each device owns some of its places:

    eight matrices [256, 256] over 8 devices      places  0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
    three matrices [64, 64] over 2 devices        places  0 1 | 2 .             the last place is empty

The parameter and its gradient stay sharded. In a step, one all-to-all sends the shards to the owners, and a second
all-to-all sends the updates back. The optimizer state of a matrix (its factors) is stored at the matrix's place: the
first array of a stack has the state of all its matrices, [places, ...] split over the devices, and the other arrays are
stored empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxshard.core.placement import Placement, View, spec_entry


class Rows(NamedTuple):
    """The layout of the all-to-all buffers: every device sends one row to each owner, and receives it back updated.

    A row holds the sender's parts of the owner's matrices, one after another:

        device 0   w0 w0 w0 w0          owns a large matrix
        device 1   v0 v0 v1 v1          owns two small ones

    Attributes:
      firsts: for each kind of matrices, the offset at which they begin in the row of each device.
      width: the number of elements of a row, the same for all.
    """

    firsts: tuple[tuple[int, ...], ...]
    width: int


def lay_rows(kinds: Sequence[tuple[Sequence[int], int, int]]) -> Rows:
    """Lay out rows for each kind: (number of matrices per device, places per device, elements of a part)."""
    used, width = [0] * len(kinds[0][0]), 0
    firsts = []
    for counts, slots, size in kinds:
        firsts.append(tuple(used))
        # Every device reads and writes as many places as the largest owner has, even past its own matrices.
        width = max(width, *(first + slots * size for first, count in zip(used, counts, strict=True) if count))
        used = [first + count * size for first, count in zip(used, counts, strict=True)]
    return Rows(tuple(firsts), width)


@dataclass(frozen=True)
class OwnedStack:
    """Matrices of equal shape and equal optimizer updates, and the device that owns each.

    Attributes:
      paths: the parameters, such as ("blocks/query/kernel", "blocks/key/kernel").
      leaves: their indices among the trained parameters.
      slices: the number of matrices that each parameter stacks along its first dimension; 0 if it is a single matrix.
      shape: the shape of one matrix.
      axes: the mesh axes over which the matrices are owned, major first.
      devices: the number of devices along these axes.
      slots: the number of places on each device.
      places: the place of each matrix, in order: index of the device * `slots` + slot on the device.
      states: for each kind of optimizer state that is stored with a matrix, the index of its array for each parameter.
      moved: the dtypes of the matrix-sized arrays that are sent to the owner, and of those that are sent back.
      flops: the FLOPs of the matrix products in the update of one matrix.
    """

    paths: tuple[str, ...]
    leaves: tuple[int, ...]
    slices: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    devices: int
    slots: int
    places: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]
    moved: tuple[tuple[str, ...], tuple[str, ...]]
    flops: int

    @property
    def count(self) -> int:
        """The number of matrices."""
        return len(self.places)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of matrices of each device."""
        owners = [place // self.slots for place in self.places]
        return tuple(owners.count(device) for device in range(self.devices))

    def units(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Join one array per parameter to a single array [count, ...]."""
        return jnp.concatenate(arrays) if self.slices else jnp.stack(arrays)

    def arrays(self, units: jax.Array) -> list[jax.Array]:
        """Split [count, ...] into one array per parameter: the inverse of `units`."""
        if not self.slices:
            return list(units)
        return [units[first : first + self.slices] for first in range(0, self.count, self.slices)]

    def place(self, units: jax.Array) -> jax.Array:
        """Reorder [count, ...] to places, [devices * slots, ...], with zeros in empty places."""
        total = self.devices * self.slots
        if self.places == tuple(range(total)):
            return units
        order = np.full(total, self.count, np.int32)
        order[list(self.places)] = np.arange(self.count, dtype=np.int32)
        empty = jnp.zeros((1, *units.shape[1:]), units.dtype)
        return jnp.take(jnp.concatenate([units, empty]), order, axis=0)

    def unplace(self, placed: jax.Array) -> jax.Array:
        """Reorder [devices * slots, ...] to [count, ...]: the inverse of `place`."""
        if self.places == tuple(range(self.devices * self.slots)):
            return placed
        return jnp.take(placed, np.asarray(self.places, np.int32), axis=0)

    def __str__(self) -> str:
        what = f"{self.paths[0]}{f' and {len(self.paths) - 1} more' if len(self.paths) > 1 else ''}"
        fewest, most = min(self.counts), max(self.counts)
        each = str(most) if fewest == most else f"{fewest} to {most}"
        empty = self.devices * self.slots - self.count
        padding = f", {empty} of {self.devices * self.slots} places empty" if empty else ""
        kept = f", {len(self.states)} arrays of state with each" if self.states else ""
        return (
            f"{what}: {self.count} matrices {list(self.shape)}, {each} on each of {self.devices} devices of "
            f"{' x '.join(self.axes)}{padding}{kept}"
        )


@dataclass(frozen=True)
class Owners:
    """The owners of all matrices of a layout.

    `print(layout.owners)` shows a line for each stack.

    Attributes:
      stacks: the stacks, the most expensive first.
      refused: (path, reason) of parameters whose update has matrix products but that have no owner.
      natural: {index of an optimizer state array that is stored with owners: its placement without owners}.

    Example:
        layout = js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.contrib.muon(1e-3))
        layout.owners.flops_per_device       # FLOPs of the update's matrix products on the busiest device
    """

    stacks: tuple[OwnedStack, ...]
    refused: tuple[tuple[str, str], ...] = ()
    natural: tuple[tuple[int, Placement], ...] = ()

    @property
    def flops_per_device(self) -> tuple[int, float]:
        """(FLOPs of the updates' matrix products on the busiest device, FLOPs per device if divided evenly)."""
        loads: dict[tuple[str, ...], np.ndarray] = {}
        for stack in self.stacks:
            load = stack.flops * np.asarray(stack.counts, np.float64)
            loads[stack.axes] = loads.get(stack.axes, 0.0) + load
        return int(sum(load.max() for load in loads.values())), float(sum(load.mean() for load in loads.values()))

    def owner_of(self, path: str) -> tuple[int, ...]:
        """Return the indices, along the axes of the stack, of the devices that own a parameter's matrices."""
        for stack in self.stacks:
            if path in stack.paths:
                each, at = stack.slices or 1, stack.paths.index(path)
                return tuple(place // stack.slots for place in stack.places[at * each : (at + 1) * each])
        raise ValueError(f"{path!r} is not owned; these are: {', '.join(p for s in self.stacks for p in s.paths)}")

    def __str__(self) -> str:
        kept = [f"  {path} has no owner: {why}" for path, why in self.refused]
        return "\n".join(["owners of whole matrices:", *(f"  {stack}" for stack in self.stacks), *kept])

    def place_state(self, shapes: Sequence[jax.ShapeDtypeStruct], placements: Sequence[Placement]) -> list[Placement]:
        """Return the placements of the optimizer's arrays, in order, with owned arrays placed in their stacks."""
        placed = list(placements)
        for stack in self.stacks:
            for numbers in stack.states:
                unit = shapes[numbers[0]].shape[1 if stack.slices else 0 :]
                stored = (stack.devices * stack.slots, *unit)
                spec = PartitionSpec(spec_entry(stack.axes), *(None,) * len(unit))
                for position, number in enumerate(numbers):
                    shape = tuple(shapes[number].shape)
                    use = PartitionSpec(*(None,) * len(shape))
                    if position:
                        view, store, owned = View(shape, shape, (0,)), PartitionSpec(None), f"with {stack.paths[0]}"
                    else:
                        view, store = View(shape, shape, stored), spec
                        owned = f"{stack.count} whole, over {' x '.join(stack.axes)}"
                    placed[number] = Placement(view, use, store, owned=owned)
        return placed

    def store(self, leaves: Sequence[jax.Array], placements: Sequence[Placement]) -> list[jax.Array]:
        """Convert the logical arrays of an optimizer's state, in order, to stored arrays."""
        stored = [x if one.owned else one.view.apply(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for first, *others in stack.states:
                stored[first] = stack.place(stack.units([leaves[number] for number in (first, *others)]))
                for number in others:
                    stored[number] = jnp.zeros((0,), leaves[number].dtype)
        return stored

    def unstore(self, leaves: Sequence[jax.Array], placements: Sequence[Placement]) -> list[jax.Array]:
        """Convert the stored arrays of an optimizer's state, in order, to logical arrays: the inverse of `store`."""
        logical = [x if one.owned else one.view.invert(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for numbers in stack.states:
                for number, x in zip(numbers, stack.arrays(stack.unplace(leaves[numbers[0]])), strict=True):
                    logical[number] = x
        return logical
