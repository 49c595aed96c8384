"""The residuals of a run in a checkpoint: rounding errors of gradients, which the next step adds to its gradients.

They are saved unchanged, f32[devices, *shape] for each parameter. If the mesh that restores them has the same number of
devices to add a gradient, they are used unchanged. On any other mesh their sum over devices, the only quantity that
matters to a step, is divided evenly over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxshard.checkpoint.leaves import Entry, encode_path
from jaxshard.checkpoint.manifest import SavedArray
from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree
from jaxshard.engines.moves import place_residual, stack_view
from jaxshard.storage.paths import AnyPath
from jaxshard.training.state import TrainState

RESIDUALS = "residuals/"
"""The prefix of residuals' names in a checkpoint."""


def refuse_residuals(run: TrainState, who: str) -> None:
    """Raise ValueError if a run has residuals (rounding errors of gradients), which the function `who` can't save."""
    if jax.tree.leaves(run.residuals):
        raise ValueError(
            f"{who}: the run has residuals of gradients, as large as the parameters for each device; use js.save, or "
            "leave them out: run._replace(residuals=())"
        )


def residual_entries(layout: Layout, residuals: PyTree) -> list[Entry]:
    """List an `Entry` for each residual (rounding error of a gradient) of a run; return [] if the run has none."""
    if not jax.tree.leaves(residuals):
        return []
    return [_entry(path, placement) for path, placement in _placements(layout)]


def saved_residuals(folder: AnyPath, layout: Layout, arrays: Sequence[SavedArray]) -> list[Entry]:
    """List an `Entry` for each residual (rounding error of a gradient) in a checkpoint.

    The shape of a residual is [devices, *shape of the parameter], with the number of devices that saved it.

    Raises:
      ValueError: the checkpoint has residuals of other parameters than the layout trains; the message names each.
    """
    counts = {array.path: array.shape[0] for array in arrays if array.path.startswith(RESIDUALS) and array.shape}
    if not counts:
        return []
    own = [_entry(path, placement) for path, placement in _placements(layout)]
    names = {entry.path for entry in own}
    raise_all(
        [f"{path}: not in the checkpoint, and trained by the layout" for path in sorted(names - counts.keys())]
        + [f"{path}: in the checkpoint, and not trained by the layout" for path in sorted(counts.keys() - names)],
        ValueError,
        f"{folder}: the residuals of gradients in the checkpoint are of other trained parameters than the layout's; "
        "restore with the trainable= that it was saved with, drop them, run._replace(residuals=()), and save that run: "
        "it restores with another trainable=, and the next step makes new ones",
    )
    grads = jax.tree.leaves(layout.grads)
    return [_of_count(entry, grad, counts[entry.path]) for entry, grad in zip(own, grads, strict=True)]


def place_residuals(layout: Layout, read: Callable[[Entry], jax.Array], found: Sequence[Entry]) -> PyTree:
    """Read the residuals in a checkpoint, and convert them to the number of devices of this layout.

    Args:
      layout: the layout.
      read: `read(entry)` returns an array of the checkpoint on the devices, in the sharding of the entry.
      found: the result of `saved_residuals`.

    Returns:
      The residuals for a TrainState of this layout; () if the checkpoint has none.
    """
    if not found:
        return ()
    tree = jax.tree.structure(layout.grads)
    own = [placement for _, placement in _placements(layout)]
    return jax.tree.unflatten(tree, [_share_out(read(entry), to, layout.mesh) for entry, to in zip(found, own)])


def _placements(layout: Layout) -> list[tuple[str, Placement]]:
    """Return (name, placement) of the residual of each trained parameter, in the order of a TrainState's leaves."""
    placed = jax.tree.map(lambda param, grad: place_residual(layout, param, grad), layout.params, layout.grads)
    return [(RESIDUALS + encode_path(path), one) for path, one in jax.tree_util.tree_leaves_with_path(placed)]


def _entry(path: str, placement: Placement) -> Entry:
    return Entry(path, placement.view.logical, jnp.dtype(jnp.float32), placement)


def _of_count(entry: Entry, grad: Placement, count: int) -> Entry:
    """Return the entry of a residual that `count` devices saved: f32[count, *shape of the parameter].

    If `entry` is for `count` devices already, return it. Otherwise the result has the sharding of the parameter's
    gradient, and its first dimension is not split.
    """
    if entry.shape[0] == count:
        return entry
    store = PartitionSpec(None, *grad.store)
    placement = replace(grad, view=stack_view(grad.view, count), store=store, use=store)
    return _entry(entry.path, placement)


def _share_out(x: jax.Array, to: Placement, mesh: Mesh) -> jax.Array:
    """Sum a residual over the devices that saved it, and divide the sum evenly over the devices of the placement `to`.

    If the two numbers of devices are equal, the residual is returned unchanged.
    """
    count = to.view.stored[0]
    if x.shape[0] == count:
        return x

    def share(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x.sum(0) / count, to.view.stored)

    shared: jax.Array = jax.block_until_ready(jax.jit(share, out_shardings=to.sharding(mesh))(x))
    return shared
