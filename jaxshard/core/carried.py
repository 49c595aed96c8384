"""`Carried`: how a run carries an optimizer state that is not stored array by array."""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh

from jaxshard.core.types import PyTree


class Carried(Protocol):
    """The way in which a run makes, stores and saves the state of its optimizer.

    Without one (`Layout.carried` is None), the state is that of `tx.init`, and each array is stored by its own
    placement. The owners of matrices (`optim/owners`) store several arrays as one stack, and `js.local` (`optim/local`)
    adds a copy of parameters and state for each replica.
    """

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> PyTree:
        """Make the first state, in logical arrays, for trained parameters."""
        ...

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert a state of logical arrays to stored ones."""
        ...

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert a state of stored arrays to logical ones: the inverse of `store`."""
        ...

    def saved(self, layout: Any) -> Any:
        """Return the layout in which checkpoints save a run of this layout."""
        ...

    def describe(self, mesh: Mesh) -> list[str]:
        """Describe it in lines, for `print(layout)`."""
        ...
