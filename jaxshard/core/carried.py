"""`Carried`: how a training state holds an optimizer state that is not stored array by array."""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh

from jaxshard.core.types import PyTree


class Carried(Protocol):
    """A protocol: make, store and save an optimizer state that is not stored array by array.

    Where `Layout.carried` is None, the state is the result of `tx.init`, and each array is stored by its own
    placement. The owners of matrices (`optim/owners`) store several arrays as one stack, and `js.local` (`optim/local`)
    adds a copy of parameters and state for each replica.
    """

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> PyTree:
        """Make the optimizer state for the first step, in logical arrays, from the trained parameters."""
        ...

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert an optimizer state of logical arrays to stored arrays."""
        ...

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert an optimizer state of stored arrays to logical arrays: the inverse of `store`."""
        ...

    def saved(self, layout: Any) -> Any:
        """Return the layout in which checkpoints save a training state that has the layout `layout`."""
        ...

    def describe(self, mesh: Mesh) -> list[str]:
        """Return lines of text that say how the optimizer state is stored, for `print(layout)`."""
        ...
