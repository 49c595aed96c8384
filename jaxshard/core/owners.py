"""Matrices that are updated whole, each by one device: who owns which, and the stacks in which their state is stored.

An optimizer such as Shampoo multiplies matrices in every step. Where its state is split over devices, all of them would
gather every matrix. Instead equal matrices form a stack, and each device owns some of its places:

    eight matrices [256, 256] over 8 devices      places  0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
    three matrices [64, 64] over 2 devices        places  0 1 | 2 .             the last place is empty

The parameter and its gradient stay split as before; in a step one all-to-all brings what the owner needs, and another
one takes the update back. What the optimizer keeps for a matrix (its factors) lives at the matrix's place: the first
array of a stack holds the state of all of them, [places, ...] split over the devices, the others are stored empty.
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
    """The rows of parts that every device sends to the owners, one to each, and that they send back.

    Each owner's matrices lie in its row one after the other:

        device 0   w0 w0 w0 w0          owns a large matrix
        device 1   v0 v0 v1 v1          owns two small ones

    Attributes:
      firsts: for each kind of matrices, where they begin in the row of each device.
      width: the elements of a row, the same for all.
    """

    firsts: tuple[tuple[int, ...], ...]
    width: int


def lay_rows(kinds: Sequence[tuple[Sequence[int], int, int]]) -> Rows:
    """Lay out the rows of (matrices of each device, places on each device, elements of a part) for each kind."""
    used, width = [0] * len(kinds[0][0]), 0
    firsts = []
    for counts, slots, size in kinds:
        firsts.append(tuple(used))
        # As many places as the fullest device has are read and written, whatever comes behind.
        width = max(width, *(first + slots * size for first, count in zip(used, counts, strict=True) if count))
        used = [first + count * size for first, count in zip(used, counts, strict=True)]
    return Rows(tuple(firsts), width)


@dataclass(frozen=True)
class OwnedStack:
    """Equal matrices with equal programs, and the device that owns each.

    Attributes:
      paths: the parameters, such as ("blocks/query/kernel", "blocks/key/kernel").
      leaves: their numbers among the trained parameters.
      slices: how many matrices each parameter stacks along its first dimension; 0 where each is one.
      shape: of one matrix.
      axes: the mesh axes over which the matrices are owned, major first.
      devices: the number of devices along these axes.
      slots: the places on each device.
      places: for each matrix, in order, its place: the number of the device times `slots`, plus the slot there.
      states: for each array of the optimizer state that lives with the matrix, its number for each parameter.
      moved: the dtypes of the arrays of the matrix's size that go to its owner, and of those that come back.
      flops: of the matrix products in the update of one matrix.
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
        """Put arrays of the parameters together as one array [count, ...]."""
        return jnp.concatenate(arrays) if self.slices else jnp.stack(arrays)

    def arrays(self, units: jax.Array) -> list[jax.Array]:
        """Take [count, ...] apart into an array for each parameter: the inverse of `units`."""
        if not self.slices:
            return list(units)
        return [units[first : first + self.slices] for first in range(0, self.count, self.slices)]

    def place(self, units: jax.Array) -> jax.Array:
        """Bring [count, ...] to the order of places, [devices * slots, ...], with zeros where nothing is owned."""
        total = self.devices * self.slots
        if self.places == tuple(range(total)):
            return units
        order = np.full(total, self.count, np.int32)
        order[list(self.places)] = np.arange(self.count, dtype=np.int32)
        empty = jnp.zeros((1, *units.shape[1:]), units.dtype)
        return jnp.take(jnp.concatenate([units, empty]), order, axis=0)

    def unplace(self, placed: jax.Array) -> jax.Array:
        """Bring [devices * slots, ...] back to [count, ...], the inverse of `place`."""
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
      refused: parameters whose program has matrix products but that have no owner, with the reason.
      natural: for each array of optimizer state that lives by ownership (by its number) where it would live without.

    Example:
        layout = js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.contrib.muon(1e-3))
        layout.owners.flops_per_device       # matrix products of the update, on the device that has the most
    """

    stacks: tuple[OwnedStack, ...]
    refused: tuple[tuple[str, str], ...] = ()
    natural: tuple[tuple[int, Placement], ...] = ()

    @property
    def flops_per_device(self) -> tuple[int, float]:
        """FLOPs of the updates' matrix products on the busiest device, and on each if they were divided evenly."""
        loads: dict[tuple[str, ...], np.ndarray] = {}
        for stack in self.stacks:
            load = stack.flops * np.asarray(stack.counts, np.float64)
            loads[stack.axes] = loads.get(stack.axes, 0.0) + load
        return int(sum(load.max() for load in loads.values())), float(sum(load.mean() for load in loads.values()))

    def owner_of(self, path: str) -> tuple[int, ...]:
        """Return the numbers of the devices, along the axes of its stack, that own the matrices of a parameter."""
        for stack in self.stacks:
            if path in stack.paths:
                each, at = stack.slices or 1, stack.paths.index(path)
                return tuple(place // stack.slots for place in stack.places[at * each : (at + 1) * each])
        raise ValueError(f"{path!r} is not owned; these are: {', '.join(p for s in self.stacks for p in s.paths)}")

    def __str__(self) -> str:
        kept = [f"  {path} has no owner: {why}" for path, why in self.refused]
        return "\n".join(["owners of whole matrices:", *(f"  {stack}" for stack in self.stacks), *kept])

    def place_state(self, shapes: Sequence[jax.ShapeDtypeStruct], placements: Sequence[Placement]) -> list[Placement]:
        """Return the placements of the optimizer's arrays, in order, with those that are owned in their stacks."""
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
        """Turn the logical arrays of an optimizer's state, in order, into stored ones."""
        stored = [x if one.owned else one.view.apply(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for first, *others in stack.states:
                stored[first] = stack.place(stack.units([leaves[number] for number in (first, *others)]))
                for number in others:
                    stored[number] = jnp.zeros((0,), leaves[number].dtype)
        return stored

    def unstore(self, leaves: Sequence[jax.Array], placements: Sequence[Placement]) -> list[jax.Array]:
        """Turn the stored arrays of an optimizer's state, in order, into logical ones: the inverse of `store`."""
        logical = [x if one.owned else one.view.invert(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for numbers in stack.states:
                for number, x in zip(numbers, stack.arrays(stack.unplace(leaves[numbers[0]])), strict=True):
                    logical[number] = x
        return logical
