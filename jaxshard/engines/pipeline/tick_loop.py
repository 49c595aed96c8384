"""The tick loop of a pipeline: any verified table, run by all devices of the ring in one program.

All devices scan over the ticks of the table together. `BufferPlan` (schedules/buffers.py) says what each device does in
a tick, and which slots of which buffers it reads and writes. In a tick, in this order:

    embed       inputs of a run of micro-batches -> inbox of the first device
    F           inbox -> kept, and y -> the next device's inbox (last stage: -> its own outbox)
    head        outbox of the last device: y -> dy of a run of micro-batches
    B           kept, outbox (dy) -> carried, and dx -> the outbox of the device before (stage 0: -> its own outbox)
    embed_grad  outbox of the first device: dx of a run -> gradients of the embedding
    W           carried -> gradients
    arrival     values that F and B sent are written into inbox and outbox of the neighbours

For p = 2 devices, m = 3 micro-batches and one chunk each, `print(js.schedules.one_f_one_b(2, 3))` shows

    tick       0 1 2 3 4 5
    device 0 F 0 1 2
             B       0 1 2
    device 1 F   0 1 2
             B     0 1 2

In tick 2 the last device does F of micro-batch 1, the second of a run, so the head runs on (0, 1): y of both in its
outbox become dy of both. Its B of 0, in the same tick, uses the first; the dx that it sends arrives in the outbox of
device 0 at the end of tick 2, where B of 0 reads it in tick 3. buffers.py follows the slots of this example.

Invariants:

- Whether an event happens in a tick (`at["f"] > 0`, ...) is the same on every device, so the conditionals contain
  collectives without a device ever waiting for another that took the other branch.
- A device without an operation in such an event computes on meaningless data from its buffers. It writes nothing (its
  slot is -1) and adds nothing to sums (`active` is False).
- A value written in an event can be read from the next event on, values from other devices from the next tick on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.layout import select
from jaxshard.core.types import PyTree
from jaxshard.engines.pipeline.embed_and_head import EmbedAndHead, Metrics, Totals
from jaxshard.engines.pipeline.floats import fill
from jaxshard.engines.pipeline.stages import GradSums, Slot, Stages
from jaxshard.schedules.buffers import BufferPlan
from jaxshard.schedules.packing import pack_columns

Tick = dict[str, jax.Array]
"""This device's values in a tick, by the names in `BufferPlan.rows`: int32 scalars."""


class Carry(NamedTuple):
    """The carry of the scan over ticks: four buffers for values that wait for a later tick, and the accumulators.

    A buffer is a tree of arrays [slots, ...].

    Attributes:
      inbox: the buffer of the inputs of chunks (groups of consecutive blocks), from their arrival to the chunk's
        forward.
      kept: the buffer of the residuals of chunks, from the chunk's forward to its backward.
      outbox: the buffer of the model's last outputs and of cotangents. An output waits for the head; a cotangent waits
        for the backward of a chunk or of the embedding.
      carried: the buffer of the values that the backward for inputs computes and the backward for weights needs.
      grads: the gradients of this device's blocks.
      totals: loss, metrics, and gradients of embedding and head.
    """

    inbox: PyTree
    kept: PyTree
    outbox: PyTree
    carried: PyTree
    grads: GradSums
    totals: Totals


def run_ticks(
    plan: BufferPlan, axis: str, stages: Stages, embed_and_head: EmbedAndHead, grads: GradSums, totals: Totals
) -> tuple[GradSums, Totals]:
    """Run a schedule's table for training, inside `shard_map` over `axis`.

    Collectives over `axis`, each of one micro-batch's activation:

    - per tick, one permute along the ring in each direction;
    - per micro-batch, one permute of the embedding's output to the first device, and one of its cotangent back;
    - per micro-batch, one permute of the last block's output from the last device, and one of its cotangent back.

    Args:
      plan: the table, with a buffer slot for every value that waits for a later tick.
      axis: the mesh axis whose devices are the pipeline.
      stages: this device's blocks.
      embed_and_head: the embedding and the head.
      grads: zeros, to which the blocks' gradients are added.
      totals: zeros, to which loss, metrics and gradients of embedding and head are added.

    Returns:
      (the gradients of the blocks, the totals of embedding and head) after all ticks: this device's share.
    """
    loop = _TickLoop.of(plan, axis, stages, embed_and_head)
    zero = jnp.int32(0)
    x = jax.eval_shape(embed_and_head.run_embed, zero)
    _, kept = jax.eval_shape(stages.forward, zero, zero, x)
    buffers = {name: loop.empty_buffer(name, like) for name, like in {"inbox": x, "kept": kept, "outbox": x}.items()}
    carried: list[Any] = []
    if loop.splits_backward:
        stashed = Slot(buffers["kept"], zero)
        _, _, carried = jax.eval_shape(stages.input_backward, zero, zero, stashed, x, grads, jnp.bool(True))
    start = Carry(**buffers, carried=loop.empty_buffer("carried", carried), grads=grads, totals=totals)
    end, _ = lax.scan(loop.tick, start, loop.rows)
    return end.grads, end.totals


def run_forwards(
    plan: BufferPlan, axis: str, stages: Stages, embed_and_head: EmbedAndHead, counts: Callable[[jax.Array], jax.Array]
) -> Metrics:
    """Evaluate micro-batches by the forward operations of a schedule's table, inside `shard_map` over `axis`.

    Return this device's share of the metrics, of the micro-batches for which `counts(microbatch)` is True. Collectives:
    as in `run_ticks`, without the collectives of the backward.
    """
    loop = _TickLoop.of(plan, axis, stages, embed_and_head)
    x = jax.eval_shape(embed_and_head.run_embed, jnp.int32(0))
    start = loop.empty_buffer("inbox", x), loop.empty_buffer("outbox", x), embed_and_head.zero_metrics()
    (_, _, metrics), _ = lax.scan(partial(loop.forward_tick, counts), start, loop.rows)
    return metrics


class _Operation(NamedTuple):
    """The operation of one device in a tick: the forward or backward of one chunk (some blocks) for one micro-batch.

    If `active` is False, the device computes on meaningless data, and the result is discarded.
    """

    chunk: jax.Array
    microbatch: jax.Array
    active: jax.Array

    @classmethod
    def of(cls, at: Tick, kind: str) -> _Operation:
        microbatch = at[f"{kind}_microbatch"]
        return cls(at[f"{kind}_chunk"], jnp.maximum(microbatch, 0), microbatch >= 0)


class _RunMember(NamedTuple):
    """The micro-batch for which one device runs the embedding or head in a tick.

    Each device of the pipeline has a micro-batch of its own. If `active` is False there is none for this device, and
    the device's result is discarded.
    """

    microbatch: jax.Array
    active: jax.Array


@dataclass(frozen=True)
class _TickLoop:
    """A schedule's table as one device runs it, with the functions for its operations.

    A run is a group of micro-batches, at most one per device, for which the devices compute embedding or head at once.

    Attributes:
      ring: the devices of the pipeline.
      device: the index of this device on the ring.
      stages: this device's blocks.
      embed_and_head: the embedding and the head.
      sizes: the number of slots of each buffer.
      splits_backward: True if the table has separate operations for the gradients of weights (W).
      rows: the table, packed, as arrays [ticks, ...] to scan over.
      read: `read(row of one tick) -> Tick` of this device.
      runs: for "embed", "head" and "embed_grad", (the micro-batch of each device, [runs + 1, devices]; the buffer slot
        of each micro-batch on each device, [runs + 1, devices, devices]).
    """

    ring: Ring
    device: jax.Array
    stages: Stages
    embed_and_head: EmbedAndHead
    sizes: dict[str, int]
    splits_backward: bool
    rows: Any
    read: Callable[[Any], Tick]
    runs: dict[str, tuple[jax.Array, jax.Array]]

    @classmethod
    def of(cls, plan: BufferPlan, axis: str, stages: Stages, embed_and_head: EmbedAndHead) -> _TickLoop:
        device, schedule = lax.axis_index(axis), plan.schedule
        per_device, read_own = pack_columns({name: x for name, x in plan.rows.items() if x.ndim == 2})
        common, read_common = pack_columns({name: x for name, x in plan.rows.items() if x.ndim == 1})

        def read(row: tuple[jax.Array, jax.Array]) -> Tick:
            return read_own(row[0][device]) | read_common(row[1])

        rows = jnp.asarray(per_device), jnp.asarray(common)
        runs = {name: jax.tree.map(jnp.asarray, values) for name, values in plan.runs.items()}
        ring = Ring(axis, schedule.stages)
        return cls(ring, device, stages, embed_and_head, plan.sizes, schedule.splits_backward, rows, read, runs)

    def tick(self, carry: Carry, row: Any) -> tuple[Carry, None]:
        """Run one tick of training.

        XLA may copy the results of a conditional, so a branch that wrote one slot would copy its buffer. Therefore
        conditionals return new values, which are written to buffers outside, by devices that have a slot for them.
        Gradient accumulators do pass through conditionals, because a new gradient is as large as its accumulator.
        Embedding and head each get only the accumulators of the weights that they read.
        """
        at, totals = self.read(row), carry.totals
        read_by_embed, read_by_head = self.embed_and_head.readers()
        no_x, no_kept, no_carried = map(self._empty_value, (carry.inbox, carry.kept, carry.carried))
        no_run = [no_x] * self.ring.size

        inputs, _ = run_if(at["embed"] >= 0, partial(self.embed, at), no_run)
        inbox = write_slots(carry.inbox, self._run_slots("embed", at), inputs)
        (y, residuals), _ = run_if(at["f"] > 0, partial(self.forward, at, inbox), (no_x, no_kept))
        kept = write_slot(carry.kept, at["f_kept"], residuals)
        # Write these before the head runs: values that wait to be written would add to its peak memory.
        kept, outbox = lax.optimization_barrier((kept, write_slot(carry.outbox, at["f_outbox"], y)))
        of_head = totals._replace(grads=select(read_by_head, totals.grads))
        dys, of_head = run_if(at["head"] >= 0, partial(self.head, at, outbox), no_run, of_head)
        outbox = write_slots(outbox, self._run_slots("head", at), dys)
        totals = of_head._replace(grads=fill(of_head.grads, totals.grads))
        # After the head, so that a cotangent it just wrote can be read by a B of the same tick.
        backward = partial(self.backward, at, kept, outbox)
        (dx, values), grads = run_if(at["b"] > 0, backward, (no_x, no_carried), carry.grads)
        outbox = write_slot(outbox, at["b_result"], dx)
        carried = write_slot(carry.carried, at["b_carried"], values)
        embed_grad = partial(self.embed_grad, at, outbox)
        _, of_embed = run_if(at["embed_grad"] >= 0, embed_grad, (), select(read_by_embed, totals.grads))
        totals = totals._replace(grads=fill(of_embed, totals.grads))
        if self.splits_backward:
            _, grads = run_if(at["w"] > 0, partial(self.weight_backward, at, carried), (), grads)
        # Values are sent in every tick; the receiver drops those that it does not need.
        inbox = write_slot(inbox, at["arrive_f"], self.ring.shift(y, 1))
        outbox = write_slot(outbox, at["arrive_b"], self.ring.shift(dx, -1))
        return Carry(inbox, kept, outbox, carried, grads, totals), None

    def forward_tick(
        self, counts: Callable[[jax.Array], jax.Array], carry: tuple[PyTree, PyTree, Metrics], row: Any
    ) -> tuple[tuple[PyTree, PyTree, Metrics], None]:
        """Run one tick of evaluation; micro-batches for which `counts` is True add to the metrics."""
        at, (inbox, outbox, metrics) = self.read(row), carry
        no_x = self._empty_value(inbox)
        inputs, _ = run_if(at["embed"] >= 0, partial(self.embed, at), [no_x] * self.ring.size)
        inbox = write_slots(inbox, self._run_slots("embed", at), inputs)
        (y, _), _ = run_if(at["f"] > 0, partial(self.forward, at, inbox), (no_x, []))
        outbox = write_slot(outbox, at["f_outbox"], y)
        _, metrics = run_if(at["head"] >= 0, partial(self.add_metrics, at, outbox, counts), (), metrics)
        return (write_slot(inbox, at["arrive_f"], self.ring.shift(y, 1)), outbox, metrics), None

    # The events. The last argument of each is the sums that it adds to; each returns (new values, these sums).

    def embed(self, at: Tick, sums: tuple[()]) -> tuple[list[PyTree], tuple[()]]:
        """Embed one micro-batch on each device, and collect the results on the first device.

        Return (the results, `sums` unchanged). `at` is the entry of the table for this device and tick.
        """
        run = self._run("embed", at)
        return self.ring.gather_to(self.embed_and_head.run_embed(run.microbatch), to=0), sums

    def forward(self, at: Tick, inbox: PyTree, sums: tuple[()]) -> tuple[tuple[PyTree, PyTree], tuple[()]]:
        """Run one chunk of blocks forward on every device. Return ((its output, its residuals), `sums` unchanged).

        `at` is the entry of the table for this device and tick.
        """
        chunk, microbatch, _ = _Operation.of(at, "f")
        return self.stages.forward(chunk, microbatch, Slot(inbox, at["f_inbox"]).whole()), sums

    def head(self, at: Tick, outbox: PyTree, totals: Totals) -> tuple[list[PyTree], Totals]:
        """Compute head and loss of one micro-batch on each device, and collect the cotangents on the last device.

        Return (the cotangents of the head's inputs, the new totals). `at` is the entry of the table for this device and
        tick.
        """
        run = self._run("head", at)
        dy, totals = self.embed_and_head.run_head(run.microbatch, self._outputs(at, outbox), totals, run.active)
        return self.ring.gather_to(dy, to=self.ring.size - 1), totals

    def add_metrics(
        self, at: Tick, outbox: PyTree, counts: Callable[[jax.Array], jax.Array], metrics: Metrics
    ) -> tuple[tuple[()], Metrics]:
        """Compute the metrics of one micro-batch on each device, and add them to `metrics` where `counts` is True.

        For evaluation only. Return ((), the new metrics). `at` is the entry of the table for this device and tick.
        """
        run = self._run("head", at)
        active = run.active & counts(run.microbatch)
        y = self._outputs(at, outbox)
        return (), self.embed_and_head.add_metrics(run.microbatch, y, metrics, active)

    def backward(
        self, at: Tick, kept: PyTree, outbox: PyTree, grads: GradSums
    ) -> tuple[tuple[PyTree, PyTree], GradSums]:
        """Run one chunk of blocks backward on every device, and add the gradients of its weights to `grads`.

        Return ((the cotangent of the chunk's input, the values that `weight_backward` needs), the new gradients). `at`
        is the entry of the table for this device and tick.
        """
        chunk, microbatch, active = _Operation.of(at, "b")
        residuals, dy = Slot(kept, at["b_kept"]), Slot(outbox, at["b_outbox"]).whole()
        if self.splits_backward:
            dx, grads, values = self.stages.input_backward(chunk, microbatch, residuals, dy, grads, active)
            return (dx, values), grads
        dx, grads = self.stages.backward(chunk, microbatch, residuals, dy, grads, active)
        return (dx, []), grads

    def embed_grad(self, at: Tick, outbox: PyTree, sums: PyTree) -> tuple[tuple[()], PyTree]:
        """Run the embedding backward for one micro-batch on each device, and add its weights' gradients to `sums`.

        The first device sends each device the cotangent of its embedding's output, from its outbox. Return ((), the new
        sums). `at` is the entry of the table for this device and tick.
        """
        run = self._run("embed_grad", at)
        values = read_slots(outbox, self._run_slots("embed_grad", at), self.ring.size)
        dx = self.ring.scatter_from(values, source=0)
        return (), self.embed_and_head.add_embed_gradients(run.microbatch, dx, sums, run.active)

    def weight_backward(self, at: Tick, carried: PyTree, grads: GradSums) -> tuple[tuple[()], GradSums]:
        """Compute the gradients of weights that a chunk's backward postponed, and add them to `grads`, on every device.

        Return ((), the new gradients). `at` is the entry of the table for this device and tick.
        """
        chunk, microbatch, active = _Operation.of(at, "w")
        values = Slot(carried, at["w_carried"])
        return (), self.stages.weight_backward(chunk, microbatch, values, grads, active)

    def empty_buffer(self, name: str, like: PyTree) -> PyTree:
        """Return zeros for the buffer `name`: one slot is like `like`, so each leaf is [slots, ...]."""
        return jax.tree.map(lambda leaf: jnp.zeros((self.sizes[name], *leaf.shape), leaf.dtype), like)

    def _empty_value(self, buffer: PyTree) -> PyTree:
        """Return zeros with the shapes of one slot of the buffer, for a tick that computes no value."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), buffer)

    def _run(self, name: str, at: Tick) -> _RunMember:
        mine = self.runs[name][0][at[name], self.device].astype(jnp.int32)
        return _RunMember(jnp.maximum(mine, 0), mine >= 0)

    def _run_slots(self, name: str, at: Tick) -> jax.Array:
        """Return the buffer slot of each device's micro-batch, [devices], for embedding or head; -1 for no slot.

        `name` is "embed", "head" or "embed_grad"; `at` is the entry of the table for this device and tick.
        """
        return self.runs[name][1][at[name], self.device]

    def _outputs(self, at: Tick, outbox: PyTree) -> PyTree:
        """Fetch the last block's output for this device's micro-batch, from the outbox of the last device."""
        values = read_slots(outbox, self._run_slots("head", at), self.ring.size)
        return self.ring.scatter_from(values, source=self.ring.size - 1)


def run_if(condition: jax.Array, fn: Callable[[Any], tuple[Any, Any]], nothing: Any, sums: Any = ()) -> tuple[Any, Any]:
    """Return `fn(sums)`, a pair (new values, new sums), if the condition holds; otherwise (`nothing`, `sums`).

    The condition must be the same on all devices.
    """
    result: tuple[Any, Any] = lax.cond(condition, fn, lambda sums: (nothing, sums), sums)
    return result


def write_slot(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """Return the buffer with the value written into a slot; unchanged if the slot is -1.

    For -1 the content of slot 0 is written back, because a conditional around the write would copy the buffer, and an
    extra slot for unused values would take as much memory as any other.
    """
    at = jnp.maximum(slot, 0)

    def write(x: jax.Array, new: jax.Array) -> Any:
        old = lax.dynamic_index_in_dim(x, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, old), at, 0)

    return jax.tree.map(write, buffer, value)


def read_slots(buffer: PyTree, slots: jax.Array, count: int) -> list[PyTree]:
    """Read the values in the first `count` of the slots with indices `slots`, [devices]."""
    return [Slot(buffer, slots[i].astype(jnp.int32)).whole() for i in range(count)]


def write_slots(buffer: PyTree, slots: jax.Array, values: list[PyTree]) -> PyTree:
    """Return the buffer with `values[i]` written into the slot `slots[i]`, for each i; -1 writes nothing."""
    for i, value in enumerate(values):
        buffer = write_slot(buffer, slots[i].astype(jnp.int32), value)
    return buffer


class Ring(NamedTuple):
    """The devices of a pipeline axis, and how values move between them."""

    axis: str
    size: int

    def shift(self, x: PyTree, by: int) -> PyTree:
        """Send every device's value to the device `by` places further. One permute."""
        return self._permute(x, [(i, (i + by) % self.size) for i in range(self.size)])

    def gather_to(self, x: PyTree, *, to: int) -> list[PyTree]:
        """Collect the values of all devices, in order, on the device `to`; other devices get zeros.

        Collectives: size - 1 permutes. One all-gather would send every value to every device.
        """
        return [x if i == to else self._permute(x, [(i, to)]) for i in range(self.size)]

    def scatter_from(self, values: list[PyTree], *, source: int) -> PyTree:
        """Send `values[i]` of the device `source` to device i, for each i. size - 1 permutes."""
        mine, device = values[source], lax.axis_index(self.axis)
        for i, value in enumerate(values):
            if i != source:
                sent = self._permute(value, [(source, i)])
                mine = jax.tree.map(lambda a, b, i=i: jnp.where(device == i, b, a), mine, sent)
        return mine

    def _permute(self, x: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), x)
