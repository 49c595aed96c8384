"""List changes that save memory of a compiled step, judged by the arrays that are live at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxshard.checks.programs.live import LiveArray
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import axes_of
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine

_CHUNKS = 16
_LEAST = 0.01
"""The smallest saving that is listed, as a share of the peak."""


class Saving(NamedTuple):
    """A change of the step, in words, with the most bytes that it can save at the peak on each device."""

    bytes: int
    change: str


def savings(
    arrays: Sequence[LiveArray], layout: Layout, engine: Engine, batch: PyTree, peak: int
) -> tuple[Saving, ...]:
    """List changes that would make a step need less memory, the largest saving first.

    Each saving counts the arrays that the change makes smaller. It is an upper bound: after the change the peak may be
    at another moment, and savings on the same arrays do not add up.

    Args:
      arrays: the arrays that are live at the peak.
      layout: the layout of the step.
      engine: the engine of the step.
      batch: the batch of the step.
      peak: the bytes that are live at the peak.
    """
    kept = [one for one in arrays if one.role == "kept activations"]
    stacked = [one for one in kept if one.kept]  # what a loop over blocks keeps
    logits = sum(one.bytes for one in arrays if one.role == "logits")
    computed = ("kept activations", "gathered weights", "logits", "temporaries")
    in_f32 = sum(one.bytes for one in arrays if one.role in computed and one.dtype == "f32")
    replicated, split = _stored(layout)
    axes, devices = layout.batch_axes, axis_size(layout.mesh, layout.batch_axes)
    over = repr(axes[0] if len(axes) == 1 else tuple(axes))
    inputs = min((one.bytes // one.count for one in stacked), default=0)  # the stacked inputs of all blocks
    found = {
        'remat="nothing" in the engine (stash="layer" of js.pipelined): blocks keep only their inputs': (
            sum(one.bytes for one in stacked or kept) - inputs
        ),
        f"js.head_loss with the vocabulary in {_CHUNKS} chunks": logits * (_CHUNKS - 1) // _CHUNKS,
        _half_the_rows(layout, engine, batch): (sum(one.bytes for one in kept) + logits) // 2,
        'precision="bf16" in the engine': in_f32 // 2 if engine.compute_dtype is None else 0,
        f"js.fsdp({over}): parameters and optimizer state split over the devices": replicated - replicated // devices,
        "twice the devices over which they are split: parameters and optimizer state in half the size": split // 2,
    }
    listed = [Saving(size, change) for change, size in found.items() if size >= _LEAST * peak]
    return tuple(sorted(listed, reverse=True))


def _half_the_rows(layout: Layout, engine: Engine, batch: PyTree) -> str:
    """Describe the change that halves activations: fewer rows at a time, or `js.context` if there is only one row."""
    devices = axis_size(layout.mesh, layout.batch_axes)
    masked = zip(jax.tree.leaves(batch), jax.tree.leaves(layout.rows_mask(batch)), strict=True)
    rows = min((x.shape[0] // devices // engine.microbatches for x, has_rows in masked if has_rows), default=0)
    if rows < 2:
        return "js.context over twice the devices: each has half of a row's positions"
    return f"half the rows of a batch, or microbatches={2 * engine.microbatches} in the engine"


def _stored(layout: Layout) -> tuple[int, int]:
    """Return the bytes per device of parameters and optimizer state: (replicated, sharded) over the batch axes."""
    sizes = {True: 0, False: 0}
    for one in layout.placed():
        if one.role in ("param", "opt"):
            is_split = bool(set(layout.batch_axes) & set(axes_of(one.placement.store)))
            sizes[is_split] += one.placement.bytes_per_device(layout.mesh, one.leaf.dtype)
    return sizes[False], sizes[True]
