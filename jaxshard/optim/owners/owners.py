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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement, View, spec_entry
from jaxshard.core.types import PyTree


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

    Example:
        layout = js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.contrib.muon(1e-3))
        layout.owners.flops_per_device       # FLOPs of the update's matrix products on the busiest device
    """

    stacks: tuple[OwnedStack, ...]
    refused: tuple[tuple[str, str], ...] = ()

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


@dataclass(frozen=True)
class OwnedState:
    """The optimizer state of a layout with owners: a `core.carried.Carried`.

    Attributes:
      owners: the owners.
      natural: (index, placement without owners) of each array that is stored in a stack.
    """

    owners: Owners
    natural: tuple[tuple[int, Placement], ...]

    @property
    def stacks(self) -> tuple[OwnedStack, ...]:
        """The stacks of the owners."""
        return self.owners.stacks

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> PyTree:
        """Make the first state, in logical arrays, for trained parameters."""
        return tx.init(params)

    def place(self, shapes: PyTree, placements: PyTree) -> PyTree:
        """Return the placements of the optimizer's arrays, with owned arrays placed in their stacks."""
        return _each(self._place, shapes, placements)

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert a state of logical arrays to stored ones."""
        return _each(self._store, state, placements)

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert a state of stored arrays to logical ones: the inverse of `store`."""
        return _each(self._unstore, state, placements)

    def saved(self, layout: Layout) -> Layout:
        """Return the layout without owners, in which checkpoints save a run: other meshes have other owners."""
        placements = jax.tree.leaves(layout.opt_state)
        for number, placement in self.natural:
            placements[number] = placement
        opt_state = jax.tree.unflatten(jax.tree.structure(layout.opt_state), placements)
        return replace(layout, opt_state=opt_state, carried=None)

    def describe(self, mesh: Mesh) -> list[str]:
        """Describe the owners in lines, for `print(layout)`."""
        return str(self.owners).splitlines()

    def _place(self, shapes: list[Any], placements: list[Placement]) -> list[Placement]:
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

    def _store(self, leaves: list[jax.Array], placements: list[Placement]) -> list[jax.Array]:
        stored = [x if one.owned else one.view.apply(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for first, *others in stack.states:
                stored[first] = stack.place(stack.units([leaves[number] for number in (first, *others)]))
                for number in others:
                    stored[number] = jnp.zeros((0,), leaves[number].dtype)
        return stored

    def _unstore(self, leaves: list[jax.Array], placements: list[Placement]) -> list[jax.Array]:
        logical = [x if one.owned else one.view.invert(x) for x, one in zip(leaves, placements, strict=True)]
        for stack in self.stacks:
            for numbers in stack.states:
                for number, x in zip(numbers, stack.arrays(stack.unplace(leaves[numbers[0]])), strict=True):
                    logical[number] = x
        return logical


def _each(convert: Callable[[list[Any], list[Placement]], list[Any]], tree: PyTree, placements: PyTree) -> PyTree:
    """Apply a function of flat lists of arrays and placements to trees."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, convert(leaves, jax.tree.leaves(placements)))
