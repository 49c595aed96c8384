"""Make layouts with owners: each matrix that the optimizer multiplies is assigned to one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.tree import map_with_path, paths
from jaxshard.core.types import PyTree
from jaxshard.optim.owners.cores import Core, TracedUpdate, find_cores
from jaxshard.optim.owners.owners import OwnedState, Owners
from jaxshard.optim.owners.slices import has_own_slices, is_program_of_one
from jaxshard.optim.owners.stacks import Group, Matrix, assign, group
from jaxshard.optim.owners.update import Stages, Update, make_owned_update, stage


class Owned(NamedTuple):
    """The result of assigning each matrix to one device (its owner), which runs the matrix products of the update.

    Attributes:
      made: the traced update of the optimizer, with its cores: the operations that need full matrices.
      groups: the matrices, grouped by shape and update.
      stages: the programs that run on the shards, before and after the cores.
      carried: how the optimizer state of the matrices is stored on their owners.
    """

    made: TracedUpdate
    groups: list[Group]
    stages: Stages
    carried: OwnedState


def own(layout: Layout, tx: Any) -> Layout:
    """Return the layout with an owner for every matrix that the optimizer multiplies: the only device that updates it.

    Nothing is computed: `tx.update` is only traced.

    Args:
      layout: a layout that was made for `tx`, without owners.
      tx: the optax transform.

    Returns:
      The layout with `owners`, in which the optimizer state of each owned matrix is stored on its owner. The unchanged
      layout if the optimizer multiplies no matrices (Adam, LAMB, Adafactor), if its state is not sharded, or if its
      update combines several parameters.

    Raises:
      ValueError: the layout has matrices with owners, and stores optimizer state on the host (`js.offload`).
    """
    found = find_owned(layout, tx)
    if found is None:
        return layout
    if size := layout.host_bytes_per_device():
        raise ValueError(
            "offload: this optimizer multiplies matrices, so each matrix is updated by the device that owns it; "
            f"{size} bytes per device of its state would be stored on the host: leave js.offload out"
        )
    placed = found.carried.place(layout.shapes.opt_state, layout.opt_state)
    return replace(layout, opt_state=placed, carried=found.carried)


def owned_update(layout: Layout, tx: Any) -> Update | None:
    """Return `tx.update` as a function that runs on the owners of the matrices of a layout; None if `tx` does not fit.

    `tx` fits if it leads to the same owners as the transform for which the layout was made.
    """
    found = find_owned(layout.without_owners, tx)
    if found is None or found.carried != layout.carried:
        return None
    return make_owned_update(found.made, found.groups, found.stages, layout)


def find_owned(layout: Layout, tx: Any) -> Owned | None:
    """Assign each matrix to a device (its owner), and split the optimizer's update into programs for shards and owners.

    Return None if no parameter is sharded in the optimizer, or if the optimizer multiplies no matrix.
    """
    params = select(layout.trainable, layout.shapes.params)
    placements = jax.tree.leaves(layout.opt_params)
    names = paths(params)
    split = {leaf for leaf, one in enumerate(placements) if axis_size(layout.mesh, axes_of(one.store)) > 1}
    if not split:
        return None
    made = find_cores(tx, params, split)
    if made is None:
        return None
    refused = {names[leaf]: why for leaf, why in made.refused.items()}
    fit = {leaf: core for leaf, core in made.cores.items() if not placements[leaf].view.extra_dims}
    refused |= {names[leaf]: "its blocks are in the order of a pipeline" for leaf in made.cores.keys() - fit.keys()}
    stacked = _find_slices(tx, params, placements, fit)
    matrices = [
        Matrix(names[leaf], core, *stacked.get(leaf, (core.program, 0, (False,) * len(core.shared))), placements[leaf])
        for leaf, core in fit.items()
    ]
    groups = group(made, matrices)
    stages = stage(made, groups) if groups else None
    if stages is None:
        return None
    stacks = assign(groups, layout.mesh)
    resting = jax.tree.leaves(layout.opt_state)
    natural = sorted(number for one in stacks for numbers in one.states for number in numbers)
    owners = Owners(tuple(stacks), tuple(sorted(refused.items())))
    return Owned(made, groups, stages, OwnedState(owners, tuple((n, resting[n]) for n in natural)))


def _find_slices(
    tx: Any, params: PyTree, placements: list[Placement], cores: dict[int, Core]
) -> dict[int, tuple[Any, int, tuple[bool, ...]]]:
    """Find the stacked parameters [L, m, n] whose L matrices are updated independently, so that each may have an owner.

    Returns:
      {index of the parameter: (program, L, sliced)}. `program` is the jaxpr that updates a single matrix [1, m, n].
      `sliced` says for each other input of the program (`core.shared`) whether it has an entry for each matrix.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    proven: dict[int, tuple[int, tuple[bool, ...]]] = {}
    for leaf, core in cores.items():
        placement, shape = placements[leaf], flat[leaf][1].shape
        if len(shape) < 3 or shape[0] < 2 or placement.store[0] is not None:
            continue
        if placement.view.stored[0] == shape[0] and (sliced := has_own_slices(core, shape[0])) is not None:
            proven[leaf] = shape[0], sliced
    found: dict[int, tuple[Any, int, tuple[bool, ...]]] = {}
    # Trace the update again with L = 1, at once for all parameters of a stack: those below the same top-level key of
    # the tree that have the same L.
    for key, count in {(str(flat[leaf][0][:1]), count) for leaf, (count, _) in proven.items()}:

        def of_one(path: Any, x: Any, key: str = key, count: int = count) -> jax.ShapeDtypeStruct:
            stacked = str(path[:1]) == key and x.shape[:1] == (count,)
            return jax.ShapeDtypeStruct((1, *x.shape[1:]) if stacked else x.shape, x.dtype)

        leaves = [leaf for leaf, (size, _) in proven.items() if size == count and str(flat[leaf][0][:1]) == key]
        one = find_cores(tx, map_with_path(of_one, params), leaves)
        of_blocks = {} if one is None else one.cores
        for leaf in leaves:
            if leaf in of_blocks and is_program_of_one(cores[leaf], of_blocks[leaf], count):
                found[leaf] = of_blocks[leaf].program, *proven[leaf]
    return found
