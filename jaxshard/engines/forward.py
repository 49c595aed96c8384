"""Evaluation of a pipelined model: forwards alone, through the same stages, so that no device holds other blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard._layout import Layout
from jaxshard._mesh import axis_size
from jaxshard._placement import only_axes
from jaxshard._typing import PyTree
from jaxshard.adapt.stacked import Stacked
from jaxshard.engines.ends import Ends, Metrics
from jaxshard.engines.explicit import combined, manual_axes
from jaxshard.engines.pipelined import Pipelined
from jaxshard.engines.share import Share
from jaxshard.engines.stages import Stages
from jaxshard.engines.ticks import Ring, get, get_all, put, put_all, rows_of, when
from jaxshard.engines.weights import users_code
from jaxshard.schedules import interleaved
from jaxshard.schedules.slots import Slots, forward_slots

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


def run_forwards(
    slots: Slots, axis: str, stages: Stages, ends: Ends, counts: Callable[[jax.Array], jax.Array]
) -> Metrics:
    """This device's share of the metrics of all micro-batches that count; the forward half of `run_ticks`."""
    device, ring = lax.axis_index(axis), Ring(axis, slots.schedule.stages)
    runs = {name: jax.tree.map(jnp.asarray, values) for name, values in slots.runs.items()}
    rows, read = rows_of(slots, device)
    x = jax.eval_shape(ends.enter, jnp.int32(0))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)

    def tick(carry: tuple[Any, Any, Metrics], row: Any) -> tuple[tuple[Any, Any, Metrics], None]:
        inbox, outbox, metrics = carry
        at = read(row)

        def embed(inbox: PyTree) -> PyTree:
            members, places = (x[at["embed"]] for x in runs["embed"])
            mine = jnp.maximum(members[device].astype(jnp.int32), 0)
            return put_all(inbox, places[device], ring.collect(ends.enter(mine), to=0))

        def forward(state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            microbatch = jnp.maximum(at["f_microbatch"], 0)
            y, _ = stages.forward(at["f_chunk"], microbatch, get(inbox, at["f_inbox"]))
            return put(state[0], at["f_outbox"], y), y

        def head(metrics: Metrics) -> Metrics:
            members, places = (x[at["head"]] for x in runs["head"])
            mine = members[device].astype(jnp.int32)
            y = ring.spread(get_all(outbox, places[device], ring.size), of=ring.size - 1)
            return ends.judge(jnp.maximum(mine, 0), y, metrics, (mine >= 0) & counts(mine))

        inbox = when(at["embed"] >= 0, embed, inbox)
        outbox, y = when(at["f"] > 0, forward, (outbox, nothing))
        metrics = when(at["head"] >= 0, head, metrics)
        return (put(inbox, at["arrive_f"], ring.shift(y, 1)), outbox, metrics), None

    def empty(name: str) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros((slots.sizes[name], *leaf.shape), leaf.dtype), x)

    return lax.scan(tick, (empty("inbox"), empty("outbox"), ends.no_metrics()), rows)[0][2]
