"""The tick loop of a pipeline: any verified table, run by all devices of the ring together, one program for all ticks.

Whether a slot of a tick (forward, backward, weights) runs is the same on every device, so no collective inside can wait
for a device that took another branch; a device without an operation there computes on what its last slots hold and
writes it where nobody reads. In a tick, in this order: embeddings of a run of micro-batches go to the first device,
forwards, losses of a run, backwards, the embeddings' gradients, weight gradients, and what is sent arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard._layout import only
from jaxshard._typing import PyTree
from jaxshard.engines.ends import Ends, Totals, filled
from jaxshard.engines.stages import Stages, Sums
from jaxshard.schedules.packing import packed
from jaxshard.schedules.slots import Slots


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
    device = lax.axis_index(axis)
    ring = Ring(axis, slots.schedule.stages)
    split = slots.schedule.splits_backward
    rows, read = rows_of(slots, device)
    runs = {name: jax.tree.map(jnp.asarray, values) for name, values in slots.runs.items()}

    # A conditional has only what it changes: a compiler may copy all that goes through one.
    of_embed, of_head = ends.used()

    def run(name: str, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(this device's micro-batch, whether it has one, the slots of all devices' pieces)."""
        members, places = runs[name]
        mine = members[number, device].astype(jnp.int32)
        return jnp.maximum(mine, 0), mine >= 0, places[number, device]

    def tick(carry: Carry, row: Any) -> tuple[Carry, None]:
        at = read(row)

        def operation(kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
            microbatch = at[f"{kind}_microbatch"]
            return at[f"{kind}_chunk"], jnp.maximum(microbatch, 0), microbatch >= 0

        def embed(inbox: PyTree) -> PyTree:
            microbatch, _, places = run("embed", at["embed"])
            return put_all(inbox, places, ring.collect(ends.enter(microbatch), to=0))

        def forward(state: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
            kept, outbox, _ = state
            chunk, microbatch, _ = operation("f")
            y, residuals = stages.forward(chunk, microbatch, get(carry.inbox, at["f_inbox"]))
            return put(kept, at["f_kept"], residuals), put(outbox, at["f_outbox"], y), y

        def head(state: tuple[PyTree, Totals]) -> tuple[PyTree, Totals]:
            outbox, totals = state
            microbatch, active, places = run("head", at["head"])
            y = ring.spread(get_all(outbox, places, ring.size), of=ring.size - 1)
            dy, totals = ends.leave(microbatch, y, totals, active)
            return put_all(outbox, places, ring.collect(dy, to=ring.size - 1)), totals

        def backward(state: tuple[Any, ...]) -> tuple[Any, ...]:
            outbox, carried, grads, _ = state
            chunk, microbatch, active = operation("b")
            arguments = chunk, microbatch, get(carry.kept, at["b_kept"]), get(outbox, at["b_outbox"]), grads, active
            if split:
                dx, grads, values = stages.first(*arguments)
                carried = put(carried, at["b_carried"], values)
            else:
                dx, grads = stages.backward(*arguments)
            return put(outbox, at["b_result"], dx), carried, grads, dx

        def embed_grad(sums: PyTree) -> PyTree:
            microbatch, active, places = run("embed_grad", at["embed_grad"])
            dx = ring.spread(get_all(carry.outbox, places, ring.size), of=0)
            return ends.enter_grad(microbatch, dx, sums, active)

        def weights(grads: Sums) -> Sums:
            chunk, microbatch, active = operation("w")
            return stages.second(chunk, microbatch, get(carry.carried, at["w_carried"]), grads, active)

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), carry.inbox)
        carry = carry._replace(inbox=when(at["embed"] >= 0, embed, carry.inbox))
        kept, outbox, y = when(at["f"] > 0, forward, (carry.kept, carry.outbox, nothing))
        totals = carry.totals
        own = totals._replace(grads=only(of_head, totals.grads))
        outbox, own = when(at["head"] >= 0, head, (outbox, own))
        totals = own._replace(grads=filled(own.grads, totals.grads))
        carry = carry._replace(kept=kept)
        outbox, carried, grads, dx = when(at["b"] > 0, backward, (outbox, carry.carried, carry.grads, nothing))
        carry = carry._replace(outbox=outbox, carried=carried)
        entered = when(at["embed_grad"] >= 0, embed_grad, only(of_embed, totals.grads))
        totals = totals._replace(grads=filled(entered, totals.grads))
        if split:
            grads = when(at["w"] > 0, weights, grads)
        return Carry(
            inbox=put(carry.inbox, at["arrive_f"], ring.shift(y, 1)),
            kept=kept,
            outbox=put(outbox, at["arrive_b"], ring.shift(dx, -1)),
            carried=carried,
            grads=grads,
            totals=totals,
        ), None

    start = _empty(slots, stages, ends, grads, totals)
    end, _ = lax.scan(tick, start, rows)
    return end.grads, end.totals


def _empty(slots: Slots, stages: Stages, ends: Ends, grads: Sums, totals: Totals) -> Carry:
    """The rings before the first tick, of the sizes that the schedule needs."""
    zero = jnp.int32(0)
    x = jax.eval_shape(ends.enter, zero)
    _, kept = jax.eval_shape(stages.forward, zero, zero, x)
    carried: list[Any] = []
    if slots.schedule.splits_backward:
        _, _, carried = jax.eval_shape(stages.first, zero, zero, kept, x, grads, jnp.bool(True))

    def ring(name: str, value: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros((slots.sizes[name], *leaf.shape), leaf.dtype), value)

    return Carry(ring("inbox", x), ring("kept", kept), ring("outbox", x), ring("carried", carried), grads, totals)


def rows_of(slots: Slots, device: jax.Array) -> tuple[Any, Callable[[Any], dict[str, jax.Array]]]:
    """(the rows to scan over, `read(row) -> this device's numbers by name`)."""
    own, read_own = packed({name: x for name, x in slots.rows.items() if x.ndim == 2})
    common, read_common = packed({name: x for name, x in slots.rows.items() if x.ndim == 1})

    def read(row: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        return read_own(row[0][device]) | read_common(row[1])

    return (jnp.asarray(own), jnp.asarray(common)), read


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
