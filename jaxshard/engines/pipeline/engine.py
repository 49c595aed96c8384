"""The pipelined engine: any verified schedule of a `Stacked` model, in one program for all devices of the ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxshard.adapt.objective import Objective, OfBlocks
from jaxshard.adapt.remat import RematPolicy, offloaded, policy_function
from jaxshard.core.collectives import sum_scalar
from jaxshard.core.layout import Layout, select
from jaxshard.core.make_layout import STACKED_EXAMPLE
from jaxshard.core.mesh import axis_size
from jaxshard.core.strategy_parts import Pipeline
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.compiler_options import Options
from jaxshard.engines.context import split_batch
from jaxshard.engines.counted_rows import has_doubtful_mean, make_mean_check
from jaxshard.engines.engine import (
    BlockPasses,
    Engine,
    Outcome,
    Precision,
    Scatter,
    ValueAndGrad,
    precision_dtypes,
)
from jaxshard.engines.explicit import combine_over
from jaxshard.engines.just_in_time import users_code
from jaxshard.engines.manual import on_each_device, row_specs, stored_specs
from jaxshard.engines.pipeline.device import DeviceStep
from jaxshard.engines.pipeline.tick_loop import run_ticks
from jaxshard.engines.positionwise import make_position_check
from jaxshard.schedules import named
from jaxshard.schedules.buffers import plan_buffers
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule

_SAVED: dict[str, RematPolicy] = {
    "layer": "nothing",
    "stage": "everything",
    "everything": "everything",
    "dots": "dots",
}
"""The remat policy of a block for each name of `stash`; "stage" recomputes the chunk, whose blocks then save all."""


@dataclass(frozen=True)
class Pipelined(Engine):
    """An engine that runs a pipeline schedule in one `shard_map` over the pipeline, batch and shard axes.

    A schedule is a table: for each device and tick, one operation (the forward or backward of a micro-batch). The
    fields `schedule` and `stash` are the arguments of `pipelined`, which makes the engine; all engines have the other
    fields.
    """

    schedule: str | Schedule = "interleaved"
    stash: RematPolicy = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feedback:
            raise ValueError(
                "reduce_dtype: js.pipelined keeps no residuals of gradients; leave feedback out, or use js.explicit() "
                "without js.pipeline in the strategy"
            )
        if isinstance(self.stash, Mapping):
            policy_function(self.stash)
            if names := offloaded(self.stash):
                raise ValueError(
                    f"stash: {', '.join(map(repr, names))} can't be offloaded: a pipeline keeps activations in rings "
                    "on the device; take 'save' or 'remat', or remat= of js.explicit or js.auto, which offload"
                )
        elif not callable(self.stash) and str(self.stash) not in _SAVED:
            raise ValueError(
                f"stash must be one of {', '.join(map(repr, _SAVED))}, a function of jax.checkpoint_policies or what "
                f'to do with named activations, such as {{"attention_out": "save"}}, got {self.stash!r}'
            )
        if not isinstance(self.schedule, (str, Schedule)):
            raise TypeError(
                f"schedule must be a name such as 'interleaved' or a js.schedules.Schedule, got {self.schedule!r}"
                + ("; call it to make the schedule" if callable(self.schedule) else "")
            )
        if isinstance(self.schedule, str):
            if self.schedule.endswith(".csv"):
                raise ValueError(f"schedule: read the table first, js.schedules.Schedule.from_csv({self.schedule!r})")
            full_name(self.schedule)

    @property
    def saved(self) -> RematPolicy:
        """The remat policy of a block: which activations its forward saves for its backward."""
        return _SAVED[self.stash] if isinstance(self.stash, str) else self.stash

    def table(self, layout: Layout) -> Schedule:
        """Return the schedule: the named schedule for the layout's number of stages, or the user's own.

        Raises:
          ValueError: the layout has no pipeline, or its stages and chunks are not those of the schedule.
        """
        pipe = _pipeline(layout)
        stages = axis_size(layout.mesh, pipe.axis)
        if isinstance(self.schedule, str):
            if pipe.chunks != 1 and full_name(self.schedule) in ONE_CHUNK:
                raise ValueError(
                    f"the schedule {self.schedule} has one chunk per device, but the layout places {pipe.chunks}: "
                    f"write js.pipeline({pipe.axis!r}, chunks=1), or take the schedule 'interleaved' or 'zero_bubble'"
                )
            return named(self.schedule, stages, self.microbatches, chunks=pipe.chunks)
        got = (self.schedule.stages, self.schedule.chunks, self.schedule.microbatches)
        want = (stages, pipe.chunks, self.microbatches)
        if got != want:
            raise ValueError(
                f"the schedule {self.schedule.name!r} is for (stages, chunks, microbatches) {got}, but mesh, "
                f"js.pipeline and js.pipelined say {want}; make them the same"
            )
        return self.schedule

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return the mesh axes over which the loss runs once per device."""
        return layout.manual_axes | {_pipeline(layout).axis}

    def row_axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the mesh axes over which the loss, and the gradients of embedding and head, are summed.

        They are the axes that split rows or sequence positions, and the pipeline's axis, whose devices compute
        embedding and head for different micro-batches.
        """
        return (*layout.sum_axes, _pipeline(layout).axis)

    def block_passes(self, layout: Layout) -> BlockPasses:
        """Return how often a step gathers and reduces the blocks' weights if every operation of every tick runs.

        Conditionals decide at run time which operations run, so a compiled program does not show the exact numbers.
        """
        table = self.table(layout)
        blocks = jax.tree.leaves(layout.shapes.params[BLOCKS])[0].shape[0]
        passes = table.ticks * _pipeline(layout).per_stage(blocks, layout.mesh)
        recomputes = self.stash == "stage"
        return BlockPasses(passes * (2 + recomputes + table.splits_backward), passes * (1 + table.splits_backward))

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and settings in a dict, for commands to print or write as JSON."""
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        return super().describe() | {"schedule": name, "stash": self.stash}

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes the loss `objective` and its gradient.

        In this function each device runs its blocks by the schedule.
        """
        if not isinstance(objective, OfBlocks):
            raise Unsuited(
                f"js.pipelined: {objective.name} is opaque: where its blocks begin and end can't be seen. Describe the "
                "model as js.Stacked and pass its method loss itself (what is added to the loss, such as a penalty, "
                f"belongs into the model's head):\n    {STACKED_EXAMPLE}"
            )
        model = objective.model
        plan, pipe = plan_buffers(self.table(layout)), _pipeline(layout)
        manual = self.manual_axes(layout)
        check_positions = make_position_check(
            layout, model.loss, model, manual, microbatches=self.microbatches, compute_dtype=self.compute_dtype
        )
        parts = self.microbatches * axis_size(layout.mesh, layout.batch_axes)
        check_means = make_mean_check(layout, model.loss, parts, manual, compute_dtype=self.compute_dtype)

        def on_device(doubts: list[bool], params: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            batch = split_batch(layout, model, batch)
            with users_code(layout):
                device = DeviceStep(self, layout, pipe, model, params, batch, key)
                embed_and_head = device.embed_and_head()
                loss = embed_and_head.trace_loss()
                doubts.append(has_doubtful_mean(loss, loss.out, select(layout.rows_mask(batch), loss.args[0])))
                embed_and_head = device.with_loss_weights(embed_and_head, loss)
                stages = device.training_stages(embed_and_head, self.saved, recompute=self.stash == "stage")
                zeros = device.zero_grad_sums(), device.zero_totals(embed_and_head)
                grads, totals = run_ticks(plan, pipe.axis, stages, embed_and_head, *zeros)
            axes = self.row_axes(layout)
            metrics = {name: combine_over(metric, axes) for name, metric in totals.metrics.items()}
            return Outcome(sum_scalar(totals.value, axes), metrics, ()), device.reduce_gradients(grads, totals.grads)

        def loss_and_grads(
            params: PyTree, state: PyTree, batch: PyTree, key: jax.Array, residuals: PyTree = ()
        ) -> tuple[Outcome, PyTree]:
            del state, residuals  # a Stacked model has no state, and this engine no residuals
            check_positions(batch)
            doubts: list[bool] = []
            run = on_each_device(
                partial(on_device, doubts),
                layout,
                manual,
                in_specs=(stored_specs(layout.params, manual), row_specs(layout, batch), PartitionSpec()),
                out_specs=(PartitionSpec(), stored_specs(layout.grads, manual)),
            )
            results: tuple[Outcome, PyTree] = run(params, batch, key)
            if any(doubts):
                check_means(batch)
            return results

        return loss_and_grads


def pipelined(
    *,
    microbatches: int,
    schedule: str | Schedule = "interleaved",
    stash: RematPolicy = "layer",
    scatter: Scatter = "end",
    precision: Precision | None = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    gather_dtype: Any = None,
    options: Options | None = None,
) -> Pipelined:
    """Make the engine that runs the stages of `js.pipeline` by a schedule, for the `loss` of a `js.Stacked` model.

    Rows of a batch must be independent and the head must return a `js.Mean` whose weight does not depend on
    activations. Code that draws random numbers by `js.row_keys` draws the same as on one device. Embedding and head run
    on groups of micro-batches, one micro-batch per device of the pipeline, so that none of them is computed twice.

    Collectives over the pipeline's axis: two permutes of a micro-batch's activation per tick; per micro-batch one
    activation to the first device, one from the last device, and their cotangents back; one all-reduce of the gradients
    outside the blocks. Over the other axes: all-gathers of weights before use (a block's each time that it runs, others
    once a step), and reductions of gradients as under `js.explicit`.

    Args:
      microbatches: the number of micro-batches into which each device's rows are cut; at least the number of devices on
        the pipeline's axis, except for gpipe.
      schedule: "gpipe", "one_f_one_b", "interleaved", "zero_bubble" or a `js.schedules.Schedule`, your own table.
      stash: the activations that a forward saves for its backward: "layer" each block's input, "stage" only the
        stage's input, "everything", "dots", a function of `jax.checkpoint_policies`, or {"attention_out": "save", ...}
        as in `remat` of `js.explicit`, which saves these and each block's input; nothing can be offloaded. Values that
        depend only on weights are never saved.
      scatter: reduce a device's gradients once, after the last micro-batch ("end"), or after each micro-batch ("each"),
        for less memory and more traffic.
      precision: "bf16" for mixed precision: parameters and optimizer state keep their dtype (f32), weights are cast to
        bf16 before they are gathered, and gradients are reduced in bf16. A `reduce_dtype` overrides the latter
        (jnp.float32 keeps sums in f32); another `compute_dtype` is refused.
      compute_dtype: the dtype to which floating weights are cast before they are gathered; None leaves them.
      reduce_dtype: the dtype in which gradients are reduced, or a format of `js.wire` without feedback, as in
        `js.explicit`; None takes the parameter's dtype.
      gather_dtype: the dtype or format in which weights are gathered, as in `js.explicit`.
      options: compiler options by name: {"xla_...": True}. They override the options that the engine sets for the chips
        of the mesh, which `print(engine)` shows; the value None removes one. The compiler itself refuses a name that
        it does not know.

    Example:
        mesh = js.make_mesh(pipe=4, data=2)
        layout = js.layout(js.compose(js.fsdp(), js.pipeline(chunks=2)), mesh, model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8))

    Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (interleaved 1F1B), Qi et al. 2024 (zero bubble).
    """
    dtypes = precision_dtypes(precision, compute_dtype, reduce_dtype)
    return Pipelined(
        microbatches, scatter, *dtypes, schedule=schedule, stash=stash, gather_dtype=gather_dtype,
        options=options or {},
    )  # fmt: skip


def _pipeline(layout: Layout) -> Pipeline:
    if layout.pipeline is None:
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        raise ValueError(
            f"js.pipelined: the layout (mesh {axes}) places no blocks in stages; add js.pipeline('pipe') to the "
            "strategy and an axis pipe to the mesh, or use js.explicit()"
        )
    return layout.pipeline
