"""What would save how much memory of a compiled step, by the arrays that are alive when it needs most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placed import Placed
from jaxshard.core.placement import axes_of
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.plan.memory_report import LiveArray

_CHUNKS = 16
_LEAST = 0.01
"""The share of the peak below which a saving is not worth a line."""


class Saving(NamedTuple):
    """A change of the step, and the most bytes on each device that it saves at the moment that is fullest now."""

    bytes: int
    change: str


def savings(
    arrays: Sequence[LiveArray], layout: Layout, engine: Engine, batch: PyTree, peak: int
) -> tuple[Saving, ...]:
    """List changes that would make a step need less memory, the largest saving first.

    Each figure is of the arrays that the change would make smaller. It is an upper bound: another moment of the step
    may be the fullest then, and changes that act on the same arrays do not add up.

    Args:
      arrays: what is alive at the fullest moment.
      layout: of the step.
      engine: of the step.
      batch: its batch.
      peak: bytes at that moment.
    """
    activations = _sum(arrays, lambda one: one.role in ("kept activations", "logits"))
    found = [
        _remat(arrays),
        _head(arrays),
        _rows(activations, layout, engine, batch),
        _narrower(arrays, engine),
        _split(layout),
        _more_devices(layout),
    ]
    return tuple(sorted((one for one in found if one.bytes >= _LEAST * peak), reverse=True))


def _remat(arrays: Sequence[LiveArray]) -> Saving:
    """All that is kept for the backward pass but one array for each block: what goes into it."""
    kept = [one for one in arrays if one.role == "kept activations"]
    kept = [one for one in kept if one.kept] or kept  # what a loop over blocks keeps, where there is one
    inputs = min((one.bytes // one.count for one in kept if one.kept), default=0)
    change = 'remat="nothing" in the engine (stash="layer" of js.pipelined): blocks keep what goes into them alone'
    return Saving(sum(one.bytes for one in kept) - inputs, change)


def _head(arrays: Sequence[LiveArray]) -> Saving:
    logits = _sum(arrays, lambda one: one.role == "logits")
    return Saving(logits * (_CHUNKS - 1) // _CHUNKS, f"js.head_loss with the vocabulary in {_CHUNKS} chunks")


def _rows(activations: int, layout: Layout, engine: Engine, batch: PyTree) -> Saving:
    devices = axis_size(layout.mesh, layout.batch_axes)
    masked = zip(jax.tree.leaves(batch), jax.tree.leaves(layout.rows_mask(batch)), strict=True)
    rows = min((x.shape[0] // devices // engine.microbatches for x, has_rows in masked if has_rows), default=0)
    if rows < 2:
        return Saving(activations // 2, "js.context over twice the devices: each has half of a row's positions")
    turns = 2 * engine.microbatches
    return Saving(activations // 2, f"half the rows of a batch, or microbatches={turns} in the engine")


def _narrower(arrays: Sequence[LiveArray], engine: Engine) -> Saving:
    roles = ("kept activations", "gathered weights", "logits", "temporaries")
    wide = _sum(arrays, lambda one: one.role in roles and one.dtype == "f32") if engine.compute_dtype is None else 0
    return Saving(wide // 2, 'precision="bf16" in the engine')


def _split(layout: Layout) -> Saving:
    """What is whole on every device along the batch axes."""
    axes = layout.batch_axes
    whole = [one for one in _stored(layout) if not set(axes) & set(axes_of(one.placement.store))]
    size = _stored_bytes(whole, layout)
    devices = axis_size(layout.mesh, axes)
    over = axes[0] if len(axes) == 1 else tuple(axes)
    return Saving(size - size // devices, f"js.fsdp({over!r}): parameters and optimizer state split over the devices")


def _more_devices(layout: Layout) -> Saving:
    """Half of what is split over the batch axes."""
    split = [one for one in _stored(layout) if set(layout.batch_axes) & set(axes_of(one.placement.store))]
    used = set().union(*(axes_of(one.placement.store) for one in split))
    size = _stored_bytes(split, layout)
    words = " x ".join(axis for axis in layout.batch_axes if axis in used)
    return Saving(size // 2, f"twice the devices of {words}: parameters and optimizer state in half the size on each")


def _stored(layout: Layout) -> list[Placed]:
    return [one for one in layout.placed() if one.role in ("param", "opt")]


def _stored_bytes(placed: Iterable[Placed], layout: Layout) -> int:
    return sum(one.placement.bytes_per_device(layout.mesh, one.leaf.dtype) for one in placed)


def _sum(arrays: Iterable[LiveArray], wanted: Callable[[LiveArray], bool]) -> int:
    return sum(one.bytes for one in arrays if wanted(one))
