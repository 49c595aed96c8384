"""The pipelined engine: any verified schedule of a `Stacked` model, in one program for all devices of the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard._collectives import all_sum
from jaxshard._keys import advance
from jaxshard._layout import STACKED_EXAMPLE, Layout, only
from jaxshard._mesh import axis_size
from jaxshard._placement import Placement, View, only_axes
from jaxshard._strategy import Pipeline
from jaxshard._tree import BLOCKS
from jaxshard._typing import LossFn, PyTree
from jaxshard.adapt.stacked import RematPolicy, Stacked, checkpoint_body, saveable_of, stacked_of
from jaxshard.engines.accumulate import Engine, Outcome, Scatter
from jaxshard.engines.ends import Ends, Totals
from jaxshard.engines.explicit import combined, make_move, manual_axes, reduced
from jaxshard.engines.halves import halves
from jaxshard.engines.stages import Stages, Sums
from jaxshard.engines.ticks import run_ticks
from jaxshard.engines.weights import Move, users_code, without_blocks
from jaxshard.schedules import Schedule, named
from jaxshard.schedules.slots import slots_of

_SAVED: dict[Any, RematPolicy] = {"layer": "nothing", "stage": "everything"}
"""What a block saves by a stash policy of these names; others are checkpoint policies themselves."""


@dataclass(frozen=True)
class Pipelined(Engine):
    """A schedule's table, run by one `shard_map` over the pipeline, the batch and the shard axes."""

    schedule: str | Schedule = "interleaved"
    stash: RematPolicy = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        saveable_of(_SAVED.get(self.stash, self.stash))
        if not isinstance(self.schedule, (str, Schedule)):
            raise TypeError(
                f"schedule must be a name such as 'interleaved' or a js.schedules.Schedule, got {self.schedule!r}"
            )

    def table(self, layout: Layout) -> Schedule:
        """The schedule for the pipeline of a layout; an error where they do not fit."""
        pipe = _pipeline(layout)
        stages = axis_size(layout.mesh, pipe.axis)
        if isinstance(self.schedule, str):
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
                share = _Share(self, layout, pipe, model, params, batch, key)
                ends = share.ends()
                stages, start = share.stages(ends), share.zeros(ends)
                grads, totals = run_ticks(slots, pipe.axis, stages, ends, share.zero_sums(), start)
            axes = (*layout.batch_axes, pipe.axis)
            metrics = {name: combined(metric, axes) for name, metric in totals.metrics.items()}
            return Outcome(all_sum(totals.value, axes), metrics, ()), share.reduced(grads, totals.grads)

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
    return Pipelined(
        microbatches, scatter, compute_dtype, reduce_dtype, _SAVED.get(stash, stash), (), schedule, stash
    )  # fmt: skip


def _pipeline(layout: Layout) -> Pipeline:
    if layout.pipeline is None:
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        raise ValueError(
            f"js.pipelined: the layout (mesh {axes}) places no blocks in stages; add js.pipeline('pipe') to the "
            "strategy and an axis pipe to the mesh, or use js.explicit()"
        )
    return layout.pipeline


@dataclass(frozen=True)
class _Share:
    """What one device has of a step, inside `shard_map`."""

    engine: Pipelined
    layout: Layout
    pipe: Pipeline
    model: Stacked
    params: PyTree
    batch: PyTree
    key: jax.Array

    def ends(self) -> Ends:
        """Embedding and head, with the global weights of the loss."""
        params, grads, stored = map(without_blocks, (self.layout.params, self.layout.grads, self.params))
        rest = jax.tree.map(lambda p, g, x: self._move(p, g).gather(x), params, grads, stored)
        ends = Ends(
            self.model.embed, self.model.head, rest, without_blocks(self.layout.trainable), self._rows, self._key,
            self.model.num_blocks + 1,
        )  # fmt: skip
        each = jax.vmap(ends.own_weights)(jnp.arange(self.engine.microbatches))
        return replace(ends, weights=tuple(all_sum(x.sum(), self.layout.batch_axes) for x in each))

    def stages(self, ends: Ends) -> Stages:
        """This device's blocks."""
        layout, number = self.layout, self.model.num_blocks
        chunks, _, each = jax.tree.leaves(layout.params[BLOCKS])[0].view.stored[:3]
        params, grads = _tails(layout.params[BLOCKS]), _tails(layout.grads[BLOCKS])
        stored = jax.tree.map(lambda x: x.reshape(chunks * each, *x.shape[3:]), self.params[BLOCKS])
        moves, trained = jax.tree.map(self._move, params, grads), [grad is not None for grad in _leaves(grads)]
        own = [x for x, mine in zip(jax.tree.leaves(moves, is_leaf=_is_move), trained, strict=True) if mine]
        dtypes = [x.dtype for x, mine in zip(jax.tree.leaves(stored), trained, strict=True) if mine]
        device, devices = lax.axis_index(self.pipe.axis), axis_size(layout.mesh, self.pipe.axis)

        def fetch(place: jax.Array) -> PyTree:
            def one(move: Move, x: jax.Array) -> jax.Array:
                return move.gather(lax.dynamic_index_in_dim(x, place, keepdims=False))

            return jax.tree.map(one, moves, stored, is_leaf=_is_move)

        def place_in_model(place: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = (place // each * devices + device) * each + place % each
            return jnp.minimum(found, number - 1), found < number

        def add(sums: Sums, place: jax.Array, new: list[Any], active: jax.Array) -> Sums:
            def one(total: jax.Array, x: Any, move: Move, dtype: Any) -> jax.Array:
                if x is None:
                    return total
                # Back in the parameter's dtype first: a weight computed in bf16 is not thereby reduced in bf16.
                return total.at[place].add(move.reduce(jnp.where(active, x, 0).astype(dtype)))

            return [one(*leaf) for leaf in zip(sums, new, own, dtypes, strict=True)]

        zero = jnp.int32(0)
        weights, x = jax.eval_shape(fetch, zero), jax.eval_shape(ends.enter, zero)
        block = checkpoint_body(self.engine.remat, self.model.block)
        block = self.model.block if self.engine.remat == "everything" else block
        programs = halves(block, weights, x, jax.eval_shape(self._key, zero, zero), trained)
        return Stages(programs, fetch, place_in_model, self._key, add, each, self.engine.stash == "stage")

    def zero_sums(self) -> Sums:
        """Zeros for the gradients of this device's blocks, as they are summed."""
        manual = manual_axes(self.layout)

        def zeros(grad: Placement, dtype: Any) -> jax.Array:
            chunks, _, each = grad.view.stored[:3]
            tail = grad.tail()
            mine = replace(tail, store=only_axes(tail.store, manual)).shard_shape(self.layout.mesh)
            return jnp.zeros((chunks * each, *(tail.view.logical if self.engine.scatter == "end" else mine)), dtype)

        dtypes = [x.dtype for x in jax.tree.leaves(self.params[BLOCKS])]
        pairs = zip(_leaves(self.layout.grads[BLOCKS]), dtypes, strict=True)
        return [zeros(grad, dtype) for grad, dtype in pairs if grad is not None]

    def zeros(self, ends: Ends) -> Totals:
        """Totals of nothing."""
        shapes = only(self.layout.trainable, self.layout.shapes.params)
        return ends.zeros(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), without_blocks(shapes)))

    def reduced(self, sums: Sums, rest: PyTree) -> PyTree:
        """All gradients as they rest, summed over the devices that have a share of them."""
        grads = iter(sums)

        def of_block(param: Placement, grad: Placement | None) -> jax.Array | None:
            if grad is None:
                return None
            total = next(grads)
            if self.engine.scatter == "end":
                count = total.shape[0]
                stack = partial(_stacked, count)
                total = reduced(self.layout, self.engine, stack(grad.tail()), total, stack(param.tail()))
            return total.reshape(grad.view.stored[0], 1, grad.view.stored[2], *total.shape[1:])

        def of_rest(param: Placement, grad: Placement | None, x: Any) -> jax.Array | None:
            return None if grad is None else reduced(self.layout, self.engine, grad, x, param, (self.pipe.axis,))

        params, placements = self.layout.params, self.layout.grads
        blocks = jax.tree.map(of_block, params[BLOCKS], placements[BLOCKS])
        return jax.tree.map(of_rest, without_blocks(params), without_blocks(placements), rest) | {BLOCKS: blocks}

    def _move(self, param: Placement, grad: Placement | None) -> Move:
        return make_move(self.layout, self.engine)(param, grad)

    def _rows(self, microbatch: jax.Array) -> PyTree:
        """A micro-batch's rows: of this device's, as many in a row."""
        size = self._size()

        def rows(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, microbatch * size, size) if x.ndim else x

        return jax.tree.map(rows, self.batch)

    def _key(self, call: jax.Array | int, microbatch: jax.Array) -> jax.Array:
        """The key of a call of the model for a micro-batch's rows, as one device would have it for them."""
        axes = self.layout.batch_axes
        first = (lax.axis_index(axes) * self.engine.microbatches if axes else 0) + microbatch
        return advance(jax.random.fold_in(self.key, call), first * self._size())

    def _size(self) -> int:
        return max(x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim) // self.engine.microbatches


def _is_move(x: Any) -> bool:
    return isinstance(x, Move)


def _leaves(placements: PyTree) -> list[Placement | None]:
    return jax.tree.leaves(placements, is_leaf=lambda x: x is None)


def _tails(placements: PyTree) -> PyTree:
    return jax.tree.map(lambda placement: placement.tail(), placements)


def _stacked(count: int, tail: Placement) -> Placement:
    """The placement of so many arrays of one, stacked."""
    view = View((count, *tail.view.logical), (count, *tail.view.padded), (count, *tail.view.stored))
    return Placement(view, PartitionSpec(None, *tail.use), PartitionSpec(None, *tail.store))
