"""What a pipelined step does: how often it uses each weight at most, and what travels between its stages."""

from __future__ import annotations

import jax

from jaxshard.adapt.stacked import stacked_of
from jaxshard.checks.collectives.weight_uses import Use, Uses
from jaxshard.core.layout import Layout
from jaxshard.core.loss import as_loss
from jaxshard.core.tree import BLOCKS, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.pipeline.engine import Pipelined


def pipelined_uses(layout: Layout, engine: Pipelined, loss_fn: LossFn, batch: PyTree) -> Uses:
    """The most that a pipelined step does with weights: as if every slot of every tick ran.

    Which slots run is decided tick by tick, so that a compiled program says no more about what is in them.
    """
    table, pipe = engine.table(layout), layout.pipeline
    model = stacked_of(loss_fn)
    assert pipe is not None and model is not None, "make_step has refused it"
    passes = table.ticks * pipe.per_stage(model.num_blocks, layout.mesh)
    fetched = passes * (2 + (engine.stash == "stage") + table.splits_backward)
    reduced = passes * (1 + table.splits_backward)
    counts: dict[Use, int] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(layout.shapes.params):
        stacked = path[0].key == BLOCKS
        counts[Use("weight", path_str(path), stacked)] = fetched if stacked else 1
        counts[Use("gradient", path_str(path), stacked)] = reduced if stacked else 1
    loss = jax.eval_shape(lambda *args: as_loss(loss_fn(*args)), layout.shapes.params, batch, layout.shapes.key)
    return Uses(counts, loss.metrics)


def pipe_axes(layout: Layout, engine: object) -> tuple[str, ...]:
    """The axis of the stages, along which what is outside the blocks has its micro-batches too; none otherwise."""
    return (layout.pipeline.axis,) if isinstance(engine, Pipelined) and layout.pipeline is not None else ()
