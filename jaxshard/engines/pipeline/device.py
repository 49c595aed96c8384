"""What one device of a pipelined step has: its blocks, its rows, and the two ends of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import RematPolicy, Stacked, checkpoint_body
from jaxshard.core.collectives import total
from jaxshard.core.keys import advance
from jaxshard.core.layout import Layout, only
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, View, only_axes
from jaxshard.core.strategy import Pipeline
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import PyTree
from jaxshard.engines.accumulate import Engine
from jaxshard.engines.explicit import make_move, manual_axes, reduced
from jaxshard.engines.just_in_time import Move, without_blocks
from jaxshard.engines.pipeline.embed_and_head import Ends, Totals
from jaxshard.engines.pipeline.split_backward import forward_only, halves
from jaxshard.engines.pipeline.stages import Stages, Sums


@dataclass(frozen=True)
class Share:
    """What one device has of a step, inside `shard_map`.

    Attributes:
      engine: how weights and gradients move, and in how many micro-batches the rows are cut.
      params: the parameters as this device stores them.
      batch: this device's rows.
      key: of the step; None in evaluation.
    """

    engine: Engine
    layout: Layout
    pipe: Pipeline
    model: Stacked
    params: PyTree
    batch: PyTree
    key: jax.Array | None

    def ends(self) -> Ends:
        """Embedding and head, their weights gathered."""
        params, grads, stored = map(without_blocks, (self.layout.params, self.layout.grads, self.params))
        rest = jax.tree.map(lambda p, g, x: self._move(p, g).gather(x), params, grads, stored)
        return Ends(
            self.model.embed, self.model.head, rest, without_blocks(self.layout.trainable), self._rows, self._key,
            self.model.num_blocks + 1,
        )  # fmt: skip

    def weighed(self, ends: Ends) -> Ends:
        """The ends with the global weights of the loss, summed over all micro-batches and devices."""
        axes = self.layout.batch_axes
        each = jax.vmap(ends.own_weights)(jnp.arange(self.engine.microbatches))
        wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in each]
        return replace(ends, weights=tuple(total(x.sum(), axes) for x in wide))

    def stages(self, ends: Ends, policy: RematPolicy, *, recompute: bool = False) -> Stages:
        """This device's blocks in training: a block keeps what the policy says, a chunk its input to `recompute`."""
        zero = jnp.int32(0)
        weights, x = jax.eval_shape(self._fetch, zero), jax.eval_shape(ends.enter, zero)
        block = self.model.block if policy == "everything" else checkpoint_body(policy, self.model.block)
        programs = halves(block, weights, x, jax.eval_shape(self._key, zero, zero), self._trained())
        return Stages(programs, self._fetch, self._place_in_model, self._key, self._add, self._cut()[1], recompute)

    def forward_stages(self) -> Stages:
        """This device's blocks in evaluation: they keep nothing."""
        programs = forward_only(self.model.block)
        return Stages(programs, self._fetch, self._place_in_model, self._key, self._add, self._cut()[1], False)

    def zero_sums(self) -> Sums:
        """Zeros for the gradients of this device's blocks, as they are summed."""
        manual = manual_axes(self.layout)

        def zeros(grad: Placement, dtype: Any) -> jax.Array:
            chunks, each = self._cut()
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
            mine = next(grads)
            if self.engine.scatter == "end":
                stack = partial(_stacked, mine.shape[0])
                mine = reduced(self.layout, self.engine, stack(grad.tail()), mine, stack(param.tail()))
            return mine.reshape(grad.view.stored[0], 1, grad.view.stored[2], *mine.shape[1:])

        def of_rest(param: Placement, grad: Placement | None, x: Any) -> jax.Array | None:
            return None if grad is None else reduced(self.layout, self.engine, grad, x, param, (self.pipe.axis,))

        params, placements = self.layout.params, self.layout.grads
        blocks = jax.tree.map(of_block, params[BLOCKS], placements[BLOCKS])
        return jax.tree.map(of_rest, without_blocks(params), without_blocks(placements), rest) | {BLOCKS: blocks}

    def _cut(self) -> tuple[int, int]:
        """(chunks of a device, blocks of a chunk)."""
        chunks, _, each = jax.tree.leaves(self.layout.params[BLOCKS])[0].view.stored[:3]
        return chunks, each

    def _fetch(self, place: jax.Array) -> PyTree:
        """The weights of this device's block at a place, gathered."""

        def one(param: Placement, grad: Placement | None, x: jax.Array) -> jax.Array:
            own = x.reshape(-1, *x.shape[3:])
            return self._move(param, grad).gather(lax.dynamic_index_in_dim(own, place, keepdims=False))

        return jax.tree.map(one, *map(_tails, self._blocks()), self.params[BLOCKS])

    def _add(self, sums: Sums, place: jax.Array, new: list[Any], active: jax.Array) -> Sums:
        """The sums with a block's gradients added, reduced first where each of them is."""

        def one(sums: jax.Array, x: Any, move: Move) -> jax.Array:
            if x is None:
                return sums
            # Back in the parameter's dtype first: a weight computed in bf16 is not thereby reduced in bf16.
            return sums.at[place].add(move.reduce(jnp.where(active, x, 0).astype(sums.dtype)))

        pairs = zip(*map(_leaves, map(_tails, self._blocks())), strict=True)
        moves = [self._move(param, grad) for param, grad in pairs if grad is not None]
        return [one(*leaf) for leaf in zip(sums, new, moves, strict=True)]

    def _place_in_model(self, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(number of this device's block at a place, whether the model has it: else it is padding)."""
        _, each = self._cut()
        devices, number = axis_size(self.layout.mesh, self.pipe.axis), self.model.num_blocks
        found = (place // each * devices + lax.axis_index(self.pipe.axis)) * each + place % each
        return jnp.minimum(found, number - 1), found < number

    def _blocks(self) -> tuple[PyTree, PyTree]:
        return self.layout.params[BLOCKS], self.layout.grads[BLOCKS]

    def _trained(self) -> list[bool]:
        return [grad is not None for grad in _leaves(self.layout.grads[BLOCKS])]

    def _move(self, param: Placement, grad: Placement | None) -> Move:
        return make_move(self.layout, self.engine)(param, grad)

    def _rows(self, microbatch: jax.Array) -> PyTree:
        """A micro-batch's rows: of this device's, as many in a row."""
        size = self._size()

        def rows(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, microbatch * size, size) if x.ndim else x

        return jax.tree.map(rows, self.batch)

    def _key(self, call: jax.Array | int, microbatch: jax.Array) -> jax.Array | None:
        """The key of a call of the model for a micro-batch's rows, as one device would have it for them."""
        if self.key is None:
            return None
        return advance(jax.random.fold_in(self.key, call), self.first_row(microbatch))

    def first_row(self, microbatch: jax.Array) -> jax.Array:
        """The global number of a micro-batch's first row."""
        axes = self.layout.batch_axes
        first = (lax.axis_index(axes) * self.engine.microbatches if axes else 0) + microbatch
        return first * self._size()

    def _size(self) -> int:
        return max(x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim) // self.engine.microbatches


def _leaves(placements: PyTree) -> list[Placement | None]:
    return jax.tree.leaves(placements, is_leaf=lambda x: x is None)


def _tails(placements: PyTree) -> PyTree:
    return jax.tree.map(lambda placement: placement.tail(), placements)


def _stacked(count: int, tail: Placement) -> Placement:
    """The placement of so many arrays of one, stacked."""
    view = View((count, *tail.view.logical), (count, *tail.view.padded), (count, *tail.view.stored))
    return Placement(view, PartitionSpec(None, *tail.use), PartitionSpec(None, *tail.store))
