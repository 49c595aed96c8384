"""Owners: the device that updates each matrix, and the stacks in which the matrices' optimizer state is stored.

An optimizer such as Shampoo multiplies matrices in every step. If its state were sharded, every device would have to
gather every matrix. Instead, matrices of equal shape form a stack with a place for each matrix, and each device owns
the matrices at some of the places:

    eight matrices [256, 256] over 8 devices      places  0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
    three matrices [64, 64] over 2 devices        places  0 1 | 2 .             the last place is empty

The parameters and their gradients stay sharded. In a step, one all-to-all sends their shards to the owners, and a
second all-to-all sends the updates back. The optimizer state of a matrix (such as Shampoo's factors) is stored on its
owner: of the state arrays of all matrices of a stack, the first stores the state of all matrices, [places, ...] split
over the devices, and the others are stored empty.
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

    Each device has the same number of slots, one for each matrix that it can own; some devices have empty slots.

    Attributes:
      paths: the parameters, such as ("blocks/query/kernel", "blocks/key/kernel").
      leaves: the indices of these parameters among the trained parameters.
      slices: the number of matrices that each parameter stacks along its first dimension; 0 if each is a single matrix.
      shape: the shape of one matrix.
      axes: the mesh axes over whose devices the matrices are distributed, major axis first.
      devices: the number of devices along these axes.
      slots: the number of slots of each device.
      places: for each matrix, (index of its owner) * `slots` + (index of its slot on the owner).
      states: for each kind of optimizer state that is stored on owners, the index of each parameter's state array.
      moved: (dtypes of the matrix-shaped arrays that are sent to an owner, dtypes of the arrays that are sent back).
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
        """The number of matrices in the stack."""
        return len(self.places)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of matrices that each device owns, such as (2, 1) for three matrices on two devices."""
        owners = [place // self.slots for place in self.places]
        return tuple(owners.count(device) for device in range(self.devices))

    def units(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Stack the matrices of all parameters, given one array per parameter, into one array [matrices, ...]."""
        return jnp.concatenate(arrays) if self.slices else jnp.stack(arrays)

    def arrays(self, units: jax.Array) -> list[jax.Array]:
        """Split an array of all matrices, [matrices, ...], into one array per parameter: the inverse of `units`."""
        if not self.slices:
            return list(units)
        return [units[first : first + self.slices] for first in range(0, self.count, self.slices)]

    def place(self, units: jax.Array) -> jax.Array:
        """Order matrices [matrices, ...] by owner and slot, [devices * slots, ...], with zeros in empty slots.

        Every device has `slots` slots, one for each matrix that it can own.
        """
        total = self.devices * self.slots
        if self.places == tuple(range(total)):
            return units
        order = np.full(total, self.count, np.int32)
        order[list(self.places)] = np.arange(self.count, dtype=np.int32)
        empty = jnp.zeros((1, *units.shape[1:]), units.dtype)
        return jnp.take(jnp.concatenate([units, empty]), order, axis=0)

    def unplace(self, placed: jax.Array) -> jax.Array:
        """Select the matrices [matrices, ...] from all slots [devices * slots, ...]: the inverse of `place`.

        Every device has `slots` slots, one for each matrix that it can own; some are empty.
        """
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
    """The owners of all matrices of a layout: for each matrix the only device that updates it.

    `print(layout.owners)` shows a line for each stack (matrices of equal shape).

    Attributes:
      stacks: the stacks, by the FLOPs of one matrix's update, the most expensive first.
      refused: (path, reason) for each parameter whose update multiplies matrices but that has no owner.

    Example:
        layout = js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.contrib.muon(1e-3))
        layout.owners.flops_per_device       # (FLOPs on the busiest device, FLOPs per device if evenly divided)
    """

    stacks: tuple[OwnedStack, ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def flops_per_device(self) -> tuple[int, float]:
        """Return the FLOPs of matrix products in one update: (on the busiest device, per device if evenly divided)."""
        loads: dict[tuple[str, ...], np.ndarray] = {}
        for stack in self.stacks:
            load = stack.flops * np.asarray(stack.counts, np.float64)
            loads[stack.axes] = loads.get(stack.axes, 0.0) + load
        return int(sum(load.max() for load in loads.values())), float(sum(load.mean() for load in loads.values()))

    def owner_of(self, path: str) -> tuple[int, ...]:
        """Return the devices that own the matrices of a parameter, one index for each matrix that the parameter stacks.

        The index counts the devices along the mesh axes over which the parameter is sharded. For example, (0,) for a
        parameter [m, n], or (0, 1, 0, 1) for a stacked parameter [4, m, n].

        Raises:
          ValueError: the parameter has no owner.
        """
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
    """Make, store and save the optimizer state of a layout in which each matrix has an owner.

    The owner of a matrix is the only device that updates it. This class implements `core.carried.Carried`.

    Attributes:
      owners: the owners.
      natural: for each state array that is stored on owners, (its index, its placement in a layout without owners).
    """

    owners: Owners
    natural: tuple[tuple[int, Placement], ...]

    @property
    def stacks(self) -> tuple[OwnedStack, ...]:
        """The stacks of the owners: the matrices, grouped by shape and update."""
        return self.owners.stacks

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> PyTree:
        """Make the initial optimizer state of the trained parameters, as global arrays in their logical shapes."""
        return tx.init(params)

    def place(self, shapes: PyTree, placements: PyTree) -> PyTree:
        """Return the placement of each array of the optimizer state: on the owners if it belongs to owned matrices."""
        return _each(self._place, shapes, placements)

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert optimizer state from logical shapes to stored arrays, with the state of each matrix on its owner."""
        return _each(self._store, state, placements)

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert optimizer state from stored arrays to logical shapes: the inverse of `store`."""
        return _each(self._unstore, state, placements)

    def saved(self, layout: Layout) -> Layout:
        """Return the layout in which checkpoints store the state: without owners, since owners depend on the mesh."""
        placements = jax.tree.leaves(layout.opt_state)
        for number, placement in self.natural:
            placements[number] = placement
        opt_state = jax.tree.unflatten(jax.tree.structure(layout.opt_state), placements)
        return replace(layout, opt_state=opt_state, carried=None)

    def describe(self, mesh: Mesh) -> list[str]:
        """Describe the owners as lines of text, for `print(layout)`."""
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
    """Apply a function of two lists, `convert(leaves, placements)`, to the leaves of two trees; return a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, convert(leaves, jax.tree.leaves(placements)))
