"""`Carried`: a protocol for optimizer states that are not stored array by array."""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh

from jaxshard.core.types import PyTree


class Carried(Protocol):
    """A protocol to make, store and save an optimizer state that is not stored array by array.

    If `Layout.carried` is None, `tx.init` makes the optimizer state, and each of its arrays is stored by a placement of
    its own. Two kinds of states need more. In `optim/owners` one device updates a matrix, and the states of several
    matrices are stored as one stack. `js.local` (`optim/local`) stores a copy of the state for each replica.

    Its methods convert between logical arrays, which have the shapes that `tx.init` gives them, and stored arrays.
    """

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> PyTree:
        """Make the optimizer state for the first step from the trained parameters.

        It consists of logical arrays: they have the shapes that `tx.init` gives them.
        """
        ...

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert an optimizer state from logical arrays (the shapes of `tx.init`) to the arrays that a run stores."""
        ...

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert an optimizer state from stored arrays to logical arrays (the shapes of `tx.init`)."""
        ...

    def saved(self, layout: Any) -> Any:
        """Return the layout of the arrays in a checkpoint of a run with the layout `layout`.

        With owners of matrices it is the layout without owners; with `js.local` it is the same layout.
        """
        ...

    def describe(self, mesh: Mesh) -> list[str]:
        """Return lines of text for `print(layout)` that say how the optimizer state is stored."""
        ...
