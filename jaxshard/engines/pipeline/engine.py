"""The pipelined engine: any verified schedule of a `Stacked` model, in one program for all devices of the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import RematPolicy, stacked_of
from jaxshard.core.collectives import total
from jaxshard.core.layout import STACKED_EXAMPLE, Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import only_axes
from jaxshard.core.strategy import Pipeline
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import Engine, Outcome, Scatter
from jaxshard.engines.explicit import combined, manual_axes
from jaxshard.engines.just_in_time import users_code
from jaxshard.engines.pipeline.device import Share
from jaxshard.engines.pipeline.tick_loop import run_ticks
from jaxshard.schedules import named
from jaxshard.schedules.buffers import slots_of
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule

_SAVED: dict[str, RematPolicy] = {
    "layer": "nothing",
    "stage": "everything",
    "everything": "everything",
    "dots": "dots",
}
"""What a block saves by a stash policy of these names; functions are checkpoint policies themselves."""


@dataclass(frozen=True)
class Pipelined(Engine):
    """A schedule's table, run by one `shard_map` over the pipeline, the batch and the shard axes."""

    schedule: str | Schedule = "interleaved"
    stash: RematPolicy = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.stash) and str(self.stash) not in _SAVED:
            raise ValueError(
                f"stash must be one of {', '.join(map(repr, _SAVED))} or a function of jax.checkpoint_policies, got "
                f"{self.stash!r}"
            )
        if not isinstance(self.schedule, (str, Schedule)):
            raise TypeError(
                f"schedule must be a name such as 'interleaved' or a js.schedules.Schedule, got {self.schedule!r}"
            )
        if isinstance(self.schedule, str):
            if self.schedule.endswith(".csv"):
                raise ValueError(f"schedule: read the table first, js.schedules.Schedule.from_csv({self.schedule!r})")
            full_name(self.schedule)

    @property
    def saved(self) -> RematPolicy:
        """What a block keeps for its own backward."""
        return _SAVED[self.stash] if isinstance(self.stash, str) else self.stash

    def table(self, layout: Layout) -> Schedule:
        """The schedule for the pipeline of a layout; an error where they do not fit."""
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

    def value_and_grad(self, loss_fn: LossFn, layout: Layout) -> Callable[..., tuple[Outcome, PyTree]]:
        """`fn(stored parameters, state, batch, key) -> (Outcome, gradients as stored)` of global arrays, under jit."""
        model = stacked_of(loss_fn)
        if model is None or loss_fn.__name__ != "loss":
            raise TypeError(
                f"js.pipelined: {getattr(loss_fn, '__qualname__', loss_fn)} is opaque: where its blocks begin and end "
                "can't be seen. Describe the model as js.Stacked and pass its method loss itself:\n"
                f"    {STACKED_EXAMPLE}"
            )
        slots, pipe = slots_of(self.table(layout)), _pipeline(layout)

        def on_device(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            with users_code(layout):
                share = Share(self, layout, pipe, model, params, batch, key)
                ends = share.weighed(share.ends())
                stages = share.stages(ends, self.saved, recompute=self.stash == "stage")
                grads, totals = run_ticks(slots, pipe.axis, stages, ends, share.zero_sums(), share.zeros(ends))
            axes = (*layout.batch_axes, pipe.axis)
            metrics = {name: combined(metric, axes) for name, metric in totals.metrics.items()}
            return Outcome(total(totals.value, axes), metrics, ()), share.reduced(grads, totals.grads)

        def loss_and_grads(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            del state  # a Stacked model has none
            manual = manual_axes(layout) | {pipe.axis}

            def specs(placements: PyTree) -> PyTree:
                return jax.tree.map(lambda placement: only_axes(placement.store, manual), placements)

            rows = jax.tree.map(lambda x: layout.batch_placement(x).store, batch)
            return jax.shard_map(
                on_device,
                mesh=layout.mesh,
                in_specs=(specs(layout.params), rows, PartitionSpec()),
                out_specs=(PartitionSpec(), specs(layout.grads)),
                axis_names=manual,
                check_vma=False,
            )(params, batch, key)

        return loss_and_grads


def pipelined(
    *,
    microbatches: int,
    schedule: str | Schedule = "interleaved",
    stash: RematPolicy = "layer",
    scatter: Scatter = "end",
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
) -> Pipelined:
    """The engine that runs the stages of `js.pipeline` by a schedule, for the method `loss` of a `js.Stacked` model.

    Rows of a batch must be independent and the head must return a `js.Mean` whose weight does not depend on
    activations. Random keys are those of `js.row_keys`: equal to one device for code that uses them. Embedding and
    head run on runs of micro-batches, one micro-batch per device of the pipeline, so that none of them is computed
    twice.

    Collectives over the pipeline's axis: two permutes of activations per tick, one activation per micro-batch and end
    to bring inputs and outputs to where they are computed and their cotangents back, and one all-reduce of the
    gradients outside the blocks. Over the others: weights gathered where they are used (per tick and block what
    `store` splits and `use` does not; what is outside the blocks once), gradients reduced as under `js.explicit`.

    Args:
      microbatches: in how many a batch is cut; at least the number of devices in the ring, for all schedules but gpipe.
      schedule: "gpipe", "one_f_one_b", "interleaved", "zero_bubble" or a `js.schedules.Schedule`, your own table.
      stash: what a forward keeps for its backward: "layer" each block's input, "stage" the stage's input alone,
        "everything", "dots" or a function of `jax.checkpoint_policies`. What depends on weights alone is never kept.
      scatter: reduce a device's gradients once, after the last micro-batch ("end"), or each as it is made ("each"),
        for less memory and more traffic.
      compute_dtype: floating weights are cast to it before they are gathered; None leaves them.
      reduce_dtype: gradients are reduced in it; None takes the parameter's dtype.

    Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (interleaved 1F1B), Qi et al. 2024 (zero bubble).
    """
    return Pipelined(microbatches, scatter, compute_dtype, reduce_dtype, schedule=schedule, stash=stash)


def _pipeline(layout: Layout) -> Pipeline:
    if layout.pipeline is None:
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        raise ValueError(
            f"js.pipelined: the layout (mesh {axes}) places no blocks in stages; add js.pipeline('pipe') to the "
            "strategy and an axis pipe to the mesh, or use js.explicit()"
        )
    return layout.pipeline
