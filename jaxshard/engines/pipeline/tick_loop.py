"""The tick loop of a pipeline: any verified table, run by all devices of the ring together, one program for all ticks.

Whether a slot of a tick (forward, backward, weights) runs is the same on every device, so no collective inside can wait
for a device that took another branch; a device without an operation there computes on what its last slots hold and
writes it where nobody reads. In a tick, in this order: embeddings of a run of micro-batches go to the first device,
forwards, losses of a run, backwards, the embeddings' gradients, weight gradients, and what is sent arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.layout import only
from jaxshard.core.types import PyTree
from jaxshard.engines.pipeline.embed_and_head import Ends, Metrics, Totals, filled
from jaxshard.engines.pipeline.stages import Stages, Sums
from jaxshard.schedules.buffers import Slots
from jaxshard.schedules.packing import packed


class Carry(NamedTuple):
    """What goes from tick to tick: the rings, every leaf [slots, ...], and the sums."""

    inbox: PyTree
    kept: PyTree
    outbox: PyTree
    carried: PyTree
    grads: Sums
    totals: Totals


def run_ticks(slots: Slots, axis: str, stages: Stages, ends: Ends, grads: Sums, totals: Totals) -> tuple[Sums, Totals]:
    """The sums of the blocks' gradients and the totals of the ends after all ticks, inside `shard_map` over `axis`.

    Collectives over `axis`: per tick one permute of activations along the ring in each direction; per run of
    micro-batches their inputs to the first device, their outputs from the last one and back, and the inputs' gradients
    from the first one, each one activation long.
    """
    loop = _Loop.of(slots, axis, stages, ends)
    zero = jnp.int32(0)
    x = jax.eval_shape(ends.enter, zero)
    _, kept = jax.eval_shape(stages.forward, zero, zero, x)
    carried: list[Any] = []
    if loop.splits:
        _, _, carried = jax.eval_shape(stages.first, zero, zero, kept, x, grads, jnp.bool(True))
    rings = {"inbox": x, "kept": kept, "outbox": x, "carried": carried}
    start = Carry(**{name: loop.empty(name, value) for name, value in rings.items()}, grads=grads, totals=totals)
    end, _ = lax.scan(loop.tick, start, loop.rows)
    return end.grads, end.totals


def run_forwards(
    slots: Slots, axis: str, stages: Stages, ends: Ends, counts: Callable[[jax.Array], jax.Array]
) -> Metrics:
    """This device's share of the metrics of the micro-batches that count: the forward half of `run_ticks`."""
    loop = _Loop.of(slots, axis, stages, ends)
    x = jax.eval_shape(ends.enter, jnp.int32(0))
    tick = partial(loop.forward_tick, counts)
    return lax.scan(tick, (loop.empty("inbox", x), loop.empty("outbox", x), ends.no_metrics()), loop.rows)[0][2]


class _Operation(NamedTuple):
    """What a device does in a slot; not `active`: nothing, on whatever the slots hold."""

    chunk: jax.Array
    microbatch: jax.Array
    active: jax.Array


@dataclass(frozen=True)
class _Loop:
    """A table with what its operations do. `at` are this device's numbers of a tick."""

    ring: Ring
    device: jax.Array
    stages: Stages
    ends: Ends
    sizes: dict[str, int]
    splits: bool
    rows: Any
    read: Callable[[Any], dict[str, jax.Array]]
    runs: dict[str, tuple[jax.Array, jax.Array]]

    @classmethod
    def of(cls, slots: Slots, axis: str, stages: Stages, ends: Ends) -> _Loop:
        device, schedule = lax.axis_index(axis), slots.schedule
        own, read_own = packed({name: x for name, x in slots.rows.items() if x.ndim == 2})
        common, read_common = packed({name: x for name, x in slots.rows.items() if x.ndim == 1})

        def read(row: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            return read_own(row[0][device]) | read_common(row[1])

        rows = jnp.asarray(own), jnp.asarray(common)
        runs = {name: jax.tree.map(jnp.asarray, values) for name, values in slots.runs.items()}
        ring = Ring(axis, schedule.stages)
        return cls(ring, device, stages, ends, slots.sizes, schedule.splits_backward, rows, read, runs)

    def tick(self, carry: Carry, row: Any) -> tuple[Carry, None]:
        """Everything that happens in a tick of training, in order."""
        at = self.read(row)
        # A conditional has only what it changes: a compiler may copy all that goes through one.
        of_embed, of_head = self.ends.used()
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), carry.inbox)
        totals = carry.totals

        inbox = when(at["embed"] >= 0, partial(self.embed, at), carry.inbox)
        forward = partial(self.forward, at, inbox)
        kept, outbox, y = when(at["f"] > 0, forward, (carry.kept, carry.outbox, nothing))
        mine = totals._replace(grads=only(of_head, totals.grads))
        outbox, mine = when(at["head"] >= 0, partial(self.head, at), (outbox, mine))
        totals = mine._replace(grads=filled(mine.grads, totals.grads))
        backward = partial(self.backward, at, kept)
        outbox, carried, grads, dx = when(at["b"] > 0, backward, (outbox, carry.carried, carry.grads, nothing))
        entered = when(at["embed_grad"] >= 0, partial(self.embed_grad, at, outbox), only(of_embed, totals.grads))
        totals = totals._replace(grads=filled(entered, totals.grads))
        if self.splits:
            grads = when(at["w"] > 0, partial(self.weights, at, carried), grads)
        inbox = put(inbox, at["arrive_f"], self.ring.shift(y, 1))
        outbox = put(outbox, at["arrive_b"], self.ring.shift(dx, -1))
        return Carry(inbox, kept, outbox, carried, grads, totals), None

    def forward_tick(
        self, counts: Callable[[jax.Array], jax.Array], carry: tuple[PyTree, PyTree, Metrics], row: Any
    ) -> tuple[tuple[PyTree, PyTree, Metrics], None]:
        """Everything that happens in a tick of evaluation; micro-batches add to the metrics where `counts` says so."""
        at = self.read(row)
        inbox, outbox, metrics = carry
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), inbox)
        inbox = when(at["embed"] >= 0, partial(self.embed, at), inbox)
        _, outbox, y = when(at["f"] > 0, partial(self.forward, at, inbox), ([], outbox, nothing))
        metrics = when(at["head"] >= 0, partial(self.judge, at, outbox, counts), metrics)
        return (put(inbox, at["arrive_f"], self.ring.shift(y, 1)), outbox, metrics), None

    def embed(self, at: dict[str, jax.Array], inbox: PyTree) -> PyTree:
        """The inbox with the inputs of a run of micro-batches, on the first device."""
        microbatch, _, places = self._run("embed", at)
        return put_all(inbox, places, self.ring.collect(self.ends.enter(microbatch), to=0))

    def forward(
        self, at: dict[str, jax.Array], inbox: PyTree, state: tuple[PyTree, PyTree, PyTree]
    ) -> tuple[PyTree, PyTree, PyTree]:
        """(what is kept, the outbox, what is sent) after a forward of every device."""
        kept, outbox, _ = state
        chunk, microbatch, _ = _operation(at, "f")
        y, residuals = self.stages.forward(chunk, microbatch, get(inbox, at["f_inbox"]))
        return put(kept, at["f_kept"], residuals), put(outbox, at["f_outbox"], y), y

    def head(self, at: dict[str, jax.Array], state: tuple[PyTree, Totals]) -> tuple[PyTree, Totals]:
        """(the outbox, on the last device with cotangents in place of outputs, the totals) after a run's losses."""
        outbox, totals = state
        microbatch, active, places = self._run("head", at)
        dy, totals = self.ends.leave(microbatch, self._outputs(outbox, places), totals, active)
        return put_all(outbox, places, self.ring.collect(dy, to=self.ring.size - 1)), totals

    def judge(
        self, at: dict[str, jax.Array], outbox: PyTree, counts: Callable[[jax.Array], jax.Array], metrics: Metrics
    ) -> Metrics:
        """The metrics with those of a run."""
        microbatch, active, places = self._run("head", at)
        return self.ends.judge(microbatch, self._outputs(outbox, places), metrics, active & counts(microbatch))

    def backward(self, at: dict[str, jax.Array], kept: PyTree, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """(the outbox, what is carried, the gradients, what is sent) after a backward of every device."""
        outbox, carried, grads, _ = state
        chunk, microbatch, active = _operation(at, "b")
        arguments = chunk, microbatch, get(kept, at["b_kept"]), get(outbox, at["b_outbox"]), grads, active
        if self.splits:
            dx, grads, values = self.stages.first(*arguments)
            carried = put(carried, at["b_carried"], values)
        else:
            dx, grads = self.stages.backward(*arguments)
        return put(outbox, at["b_result"], dx), carried, grads, dx

    def embed_grad(self, at: dict[str, jax.Array], outbox: PyTree, sums: PyTree) -> PyTree:
        """The embedding's gradients with those of a run."""
        microbatch, active, places = self._run("embed_grad", at)
        dx = self.ring.spread(get_all(outbox, places, self.ring.size), of=0)
        return self.ends.enter_grad(microbatch, dx, sums, active)

    def weights(self, at: dict[str, jax.Array], carried: PyTree, grads: Sums) -> Sums:
        """The gradients with those that waited, of every device."""
        chunk, microbatch, active = _operation(at, "w")
        return self.stages.second(chunk, microbatch, get(carried, at["w_carried"]), grads, active)

    def empty(self, name: str, value: PyTree) -> PyTree:
        """A ring of slots for values like this one."""
        return jax.tree.map(lambda leaf: jnp.zeros((self.sizes[name], *leaf.shape), leaf.dtype), value)

    def _run(self, name: str, at: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(this device's micro-batch in a run, whether it has one, the slots of all devices' pieces)."""
        members, places = self.runs[name]
        mine = members[at[name], self.device].astype(jnp.int32)
        return jnp.maximum(mine, 0), mine >= 0, places[at[name], self.device]

    def _outputs(self, outbox: PyTree, places: jax.Array) -> PyTree:
        """Each device's output of a run, from the last device."""
        return self.ring.spread(get_all(outbox, places, self.ring.size), of=self.ring.size - 1)


def _operation(at: dict[str, jax.Array], kind: str) -> _Operation:
    microbatch = at[f"{kind}_microbatch"]
    return _Operation(at[f"{kind}_chunk"], jnp.maximum(microbatch, 0), microbatch >= 0)


def when(condition: jax.Array, fn: Callable[[Any], Any], state: Any) -> Any:
    """`fn(state)` where the condition, the same on every device, holds; else the state."""
    return lax.cond(condition, fn, lambda state: state, state)


def get(ring: PyTree, slot: jax.Array) -> PyTree:
    """What lies in a slot of a ring."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), ring)


def put(ring: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """The ring with the value in a slot."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), ring, value)


def get_all(ring: PyTree, slots: jax.Array, count: int) -> list[PyTree]:
    """What lies in several slots."""
    return [get(ring, slots[i].astype(jnp.int32)) for i in range(count)]


def put_all(ring: PyTree, slots: jax.Array, values: list[PyTree]) -> PyTree:
    """The ring with values in several slots."""
    for i, value in enumerate(values):
        ring = put(ring, slots[i].astype(jnp.int32), value)
    return ring


class Ring(NamedTuple):
    """The devices of a pipeline axis, and how values move between them."""

    axis: str
    size: int

    def shift(self, x: PyTree, by: int) -> PyTree:
        """Every device's value at its neighbour."""
        return self._permuted(x, [(i, (i + by) % self.size) for i in range(self.size)])

    def collect(self, x: PyTree, *, to: int) -> list[PyTree]:
        """Every device's value, in order, on the device `to`; elsewhere nothing that means anything."""
        return [x if i == to else self._permuted(x, [(i, to)]) for i in range(self.size)]

    def spread(self, values: list[PyTree], *, of: int) -> PyTree:
        """Of the values of device `of` each device's own."""
        mine, device = values[of], lax.axis_index(self.axis)
        for i, value in enumerate(values):
            if i != of:
                sent = self._permuted(value, [(of, i)])
                mine = jax.tree.map(lambda a, b, i=i: jnp.where(device == i, b, a), mine, sent)
        return mine

    def _permuted(self, x: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), x)
