"""One equation of the loss in both traces: for all positions, and for one device's positions."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from jaxshard.adapt.positionwise.facts import Mixes, differing

_LAYOUT = frozenset({"sharding", "out_sharding", "accuracy", "name", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"})
"""Equation parameters that do not affect values, or are functions, which can't be compared."""

_SIZES = frozenset({"shape", "new_sizes", "start_indices", "limit_indices", "slice_sizes", "sizes", "results"})
"""Equation parameters that may depend on the number of positions, since the rules look at the resulting shapes."""


class Pair(NamedTuple):
    """One equation of the loss, as it was traced for all positions and as it was traced for one device's positions.

    Attributes:
      one: the equation in the trace for all positions.
      two: the equation in the trace for one device's positions.
      length: the number of all positions.
      parts: the number of devices that split the positions.
      axes: the mesh axes that split positions.
    """

    one: Any
    two: Any
    length: int
    parts: int
    axes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.one.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.one.params
        return params

    def shapes(self, operand: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return an operand's shape in the trace for all positions, and in the trace for one device's positions."""
        return self.one.invars[operand].aval.shape, self.two.invars[operand].aval.shape

    def out_shapes(self, result: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a result's shape in the trace for all positions, and in the trace for one device's positions."""
        return self.one.outvars[result].aval.shape, self.two.outvars[result].aval.shape

    def grown(self, result: int = 0) -> list[int]:
        """List the dimensions of a result whose size depends on the number of positions.

        They differ between the traces for all positions and for one device's positions.
        """
        return differing(*self.out_shapes(result))

    def is_whole(self, operand: int, dim: int, sizes: tuple[int, ...], other_sizes: tuple[int, ...]) -> bool:
        """Return True if a slice of an operand takes all of dimension `dim`, in both traces.

        `sizes` and `other_sizes` are the sizes of the slice in the traces for all positions and for one device's
        positions.
        """
        one, two = self.shapes(operand)
        return sizes[dim] == one[dim] and other_sizes[dim] == two[dim]

    def changed(self) -> list[str]:
        """List the names of the equation's parameters that differ between the two traces."""
        one, two = self.one.params, self.two.params
        return [name for name in one if name not in _LAYOUT and not _equal(one[name], two.get(name))]

    def check_unchanged(self, names: Set[str] | None = None) -> None:
        """Raise `Mixes` if a parameter of the equation differs between the two traces.

        Such a parameter depends on the number of positions, so devices would compute another function than a single
        device.

        Args:
          names: the parameters to compare; by default all but sizes, such as `slice_sizes`, which may differ.
        """
        found = [name for name in self.changed() if (name not in _SIZES if names is None else name in names)]
        if found:
            raise Mixes(f"has a parameter {found[0]!r} that depends on how many positions there are", "choice")


def _equal(one: Any, two: Any) -> bool:
    if callable(one) or hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        return True  # programs are walked through
    try:
        return bool(one == two or (one != one and two != two))  # the fill value of a gather may be NaN
    except (TypeError, ValueError):
        return False
