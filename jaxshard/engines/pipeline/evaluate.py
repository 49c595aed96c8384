"""Evaluate a pipelined model by forwards through the same stages, so that no blocks move between devices.

In training the user chooses the number of micro-batches; a batch of evaluation may have any number of rows. A device's
rows are cut into as many equal micro-batches as divide them, up to 4 per device of the ring. The schedule `interleaved`
needs at least as many micro-batches as devices, so missing ones repeat rows and are not counted:

    p = 4 devices, 3 rows each     micro-batches 0 1 2 of one row, and 3, again the row of 2, where `counts` is False
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import row_count
from jaxshard.core.types import PyTree
from jaxshard.engines.context import split_batch
from jaxshard.engines.explicit import combine_over
from jaxshard.engines.just_in_time import users_code
from jaxshard.engines.manual import on_each_device, row_specs, stored_specs
from jaxshard.engines.pipeline.device import DeviceStep
from jaxshard.engines.pipeline.embed_and_head import Metrics
from jaxshard.engines.pipeline.engine import Pipelined
from jaxshard.engines.pipeline.tick_loop import run_forwards
from jaxshard.engines.positionwise import make_position_check
from jaxshard.schedules.buffers import plan_forward_buffers
from jaxshard.schedules.named import interleaved

MICROBATCHES_PER_DEVICE = 4
"""The most micro-batches per device of the ring: more make the bubble shorter, but each micro-batch smaller."""


def make_evaluate(model: Stacked, layout: Layout) -> Callable[..., Metrics]:
    """Make the function that evaluates a pipelined model on a batch.

    Collectives over the pipeline's axis: one permute of activations per tick; per micro-batch one permute of the
    embedding's output to the first device, and one of the last block's output from the last device; one all-reduce of
    the metrics.

    Returns:
      `fn(stored parameters, batch, rows=None) -> {"loss": js.Mean, ...}`, the loss and the head's metrics. Call it
      under jit, with global arrays. With `rows`, a global int32 scalar, only the first `rows` rows of the batch count;
      micro-batches then have one row each.
    """
    pipe = layout.pipeline
    assert pipe is not None, "the layout has a pipeline"
    devices = axis_size(layout.mesh, pipe.axis)
    parts = axis_size(layout.mesh, layout.batch_axes)

    def evaluate(params: PyTree, batch: PyTree, rows: jax.Array | None = None) -> Metrics:
        own = row_count(select(layout.rows_mask(batch), batch)) // parts
        most = MICROBATCHES_PER_DEVICE * devices
        microbatches = own if rows is not None else max(n for n in range(1, most + 1) if own % n == 0)
        # At least one micro-batch per device; `counts` masks those past the end of the batch, which repeat its last
        # rows (a dynamic slice is clamped to the end).
        plan = plan_forward_buffers(interleaved(devices, max(microbatches, devices), chunks=pipe.chunks))
        engine = Pipelined(microbatches=microbatches)

        def on_device(params: PyTree, batch: PyTree, rows: jax.Array | None) -> Metrics:
            device = DeviceStep(engine, layout, pipe, model, params, split_batch(layout, model, batch), None)

            def counts(microbatch: jax.Array) -> jax.Array:
                inside = microbatch < microbatches
                return inside if rows is None else inside & (device.first_row(microbatch) < rows)

            with users_code(layout):
                stages, embed_and_head = device.evaluation_stages(), device.embed_and_head()
                found = run_forwards(plan, pipe.axis, stages, embed_and_head, counts)
            return {name: combine_over(metric, engine.row_axes(layout)) for name, metric in found.items()}

        manual = engine.manual_axes(layout)
        make_position_check(layout, model.evaluate, model, manual, microbatches=microbatches, with_key=False)(batch)
        specs = stored_specs(layout.params, manual), row_specs(layout, batch), PartitionSpec()
        run = on_each_device(on_device, layout, manual, in_specs=specs, out_specs=PartitionSpec())
        metrics: Metrics = run(params, batch, rows)
        return metrics

    return evaluate
