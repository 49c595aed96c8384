"""Call a strategy, and check the placements that it returns.

Strategies are functions that anyone may write, so their placements are checked before anything is made from them: a
wrong one would otherwise show much later, as an error of JAX about an array without a name.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxshard.core.mesh import axis_size, mesh_str
from jaxshard.core.placement import Placement, axes_of, split_dims, whole
from jaxshard.core.strategy_parts import Strategy
from jaxshard.core.tree import Leaf, raise_all
from jaxshard.core.types import Role


class Placer:
    """Calls a strategy for each array, checks the placements that it returns, and collects wrong ones for one error.

    Args:
      strategy: the strategy to call.
      mesh: the mesh to pass to the strategy.
    """

    def __init__(self, strategy: Strategy, mesh: Mesh):
        self._strategy, self.mesh = strategy, mesh
        self._problems: dict[tuple[str, str], list[Role]] = {}

    def place(self, role: Role, leaf: Leaf) -> Placement:
        """Return the strategy's placement of one array in one role, such as "param" or "opt".

        If the placement is wrong, record why and return a replicated placement. `raise_problems` raises the error.
        """
        try:
            placement = self._strategy(role, leaf, whole(leaf), self.mesh)
        except Exception as error:  # of a function that anyone may write; it goes on with the array named
            error.add_note(f"while the strategy placed {role} {leaf.path} {list(leaf.shape)}")
            raise
        problem = _find_problem(placement, role, leaf, self.mesh)
        if not problem:
            return placement
        self._problems.setdefault((f"{leaf.path} {list(leaf.shape)}", problem), []).append(role)
        return whole(leaf)

    def raise_problems(self) -> None:
        """Raise one ValueError that lists every wrong placement recorded so far; do nothing if there is none."""
        raise_all(
            (f"{', '.join(roles)} {array}: {problem}" for (array, problem), roles in self._problems.items()),
            ValueError,
            "the strategy placed arrays where they can't live",
        )


def place_batch(strategy: Strategy, leaf: Leaf, mesh: Mesh) -> Placement:
    """Return the strategy's placement of one array of a batch; raise ValueError if the placement is wrong."""
    placer = Placer(strategy, mesh)
    placement = placer.place("batch", leaf)
    placer.raise_problems()
    return placement


def _find_problem(placement: Any, role: Role, leaf: Leaf, mesh: Mesh) -> str:
    """Return as text what is wrong with a placement and how to fix it; return "" if it is right."""
    if not isinstance(placement, Placement):
        return f"got {type(placement).__name__}; return the placement that the strategy received, or one made from it"
    view, use, store = placement.view, placement.use, placement.store
    if view.logical != leaf.shape:
        return f"its view is of an array {list(view.logical)}; make it from the placement that the strategy received"
    for name, spec, sizes in (("store", store, view.stored), ("use", use, view.logical)):
        if len(spec) != len(sizes):
            return f"{name} has {len(spec)} entries for {len(sizes)} dimensions; give each one, None where it is whole"
        axes = axes_of(spec)
        if missing := [axis for axis in axes if axis not in mesh.shape]:
            return f"{name} names the axis {missing[0]!r}, which the mesh ({mesh_str(mesh)}) lacks; use one of its axes"
        if repeated := [axis for axis in axes if axes.count(axis) > 1]:
            return f"{name} names the axis {repeated[0]!r} {axes.count(repeated[0])} times; use an axis once"
    for dim, (size, entry) in enumerate(zip(view.stored, store, strict=True)):
        parts = axis_size(mesh, entry)
        if size % parts:
            fit = size + -size % parts
            fix = f"use {fit} rows" if role == "batch" else f"pad it with placement.pad({dim}, {fit}) before the split"
            return f"dim {dim} has {size} elements, which the {parts} devices of {entry!r} do not divide; {fix}"
    if placement.memory and role != "opt":
        return f"it is stored in {placement.memory!r}, where only optimizer state can be; leave memory as it is"
    at_rest = {(view.logical_dim(dim), axis) for dim, axis in split_dims(store)}
    for dim, axis in split_dims(use):
        if (dim, axis) not in at_rest:
            return f"use splits dim {dim} over {axis!r}, store does not; split it at rest as well, with placement.split"
    return ""
