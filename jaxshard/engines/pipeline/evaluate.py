"""Evaluation of a pipelined model: forwards alone, through the same stages, so that no device holds other blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import only_axes
from jaxshard.core.types import PyTree
from jaxshard.engines.explicit import combined, manual_axes
from jaxshard.engines.just_in_time import users_code
from jaxshard.engines.pipeline.device import Share
from jaxshard.engines.pipeline.embed_and_head import Metrics
from jaxshard.engines.pipeline.engine import Pipelined
from jaxshard.engines.pipeline.tick_loop import run_forwards
from jaxshard.schedules.buffers import forward_slots
from jaxshard.schedules.named import interleaved

TURNS = 4
"""At most so many micro-batches per device of the ring."""


def make_evaluate(model: Stacked, layout: Layout) -> Callable[..., Metrics]:
    """`fn(stored parameters, batch, rows=None) -> metrics` of global arrays, under jit: {"loss": ...} and the head's.

    With `rows` only so many rows of the batch count, the first ones: micro-batches are then one row per device long.
    """
    pipe = layout.pipeline
    assert pipe is not None, "the layout has a pipeline"
    stages = axis_size(layout.mesh, pipe.axis)
    parts = axis_size(layout.mesh, layout.batch_axes)

    def evaluate(params: PyTree, batch: PyTree, rows: jax.Array | None = None) -> Metrics:
        own = max(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim) // parts
        turns = own if rows is not None else max(n for n in range(1, TURNS * stages + 1) if own % n == 0)
        # Those that go beyond the batch go around for company, and count nowhere.
        slots = forward_slots(interleaved(stages, max(turns, stages), chunks=pipe.chunks))
        engine = Pipelined(microbatches=turns)

        def on_device(params: PyTree, batch: PyTree, rows: jax.Array | None) -> Metrics:
            share = Share(engine, layout, pipe, model, params, batch, None)

            def counts(microbatch: jax.Array) -> jax.Array:
                inside = microbatch < turns
                return inside if rows is None else inside & (share.first_row(microbatch) < rows)

            with users_code(layout):
                found = run_forwards(slots, pipe.axis, share.forward_stages(), share.ends(), counts)
            return {name: combined(metric, (*layout.batch_axes, pipe.axis)) for name, metric in found.items()}

        manual = manual_axes(layout)
        specs = jax.tree.map(lambda placement: only_axes(placement.store, manual), layout.params)
        return jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(specs, jax.tree.map(lambda x: layout.batch_placement(x).store, batch), PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=manual,
            check_vma=False,
        )(params, batch, rows)

    return evaluate
