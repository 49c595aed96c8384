"""One device's part of a pipelined step: its blocks, its rows, and the model's embedding and head.

Stored, a parameter of the blocks is [chunks, p, blocks per chunk, ...], its second dimension split over the pipeline
(`js.pipeline`), so inside `shard_map` a device has [chunks, 1, blocks per chunk, ...]. Here it is reshaped to a stack
[chunks * blocks per chunk, ...], whose first index is the local index of a block:

    p = 2, chunks = 2, 7 blocks, 2 per chunk     stored on device 0    stored on device 1
        chunk 0                                    blocks 0 1            blocks 2 3
        chunk 1                                    blocks 4 5            blocks 6 and padding

    index of a block in the model = (chunk * p + device) * blocks per chunk + index in the chunk

Everything is computed for one micro-batch at a time: `microbatch` is its index among this device's rows, which are cut
into `engine.microbatches` equal slices. Weights of a block are gathered each time that it runs, others once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.remat import RematPolicy, check_names, checkpoint_body
from jaxshard.adapt.stacked import Stacked
from jaxshard.core.collectives import sum_scalar
from jaxshard.core.jaxpr import Program
from jaxshard.core.keys import advance
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, View, only_axes
from jaxshard.core.strategy_parts import Pipeline
from jaxshard.core.tree import BLOCKS, row_count
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.engines.just_in_time import Move, without_blocks
from jaxshard.engines.manual import used_shape
from jaxshard.engines.moves import make_move, reduce_gradient
from jaxshard.engines.pipeline.embed_and_head import EmbedAndHead, Totals
from jaxshard.engines.pipeline.split_backward import SplitBlock, forward_only, split_block
from jaxshard.engines.pipeline.stages import GradSums, Stages


@dataclass(frozen=True)
class DeviceStep:
    """One device's part of a pipelined step, inside `shard_map`.

    Attributes:
      engine: the engine, with its dtypes and its number of micro-batches.
      layout: the layout.
      pipe: the strategy of the pipeline, which names its mesh axis and the number of chunks (groups of consecutive
        blocks) per device.
      model: the blocks, embedding and head.
      params: this device's shards of the parameters.
      batch: this device's rows.
      key: the step's random key; None in evaluation.
    """

    engine: Engine
    layout: Layout
    pipe: Pipeline
    model: Stacked
    params: PyTree
    batch: PyTree
    key: jax.Array | None

    def embed_and_head(self) -> EmbedAndHead:
        """Gather the weights of embedding and head, and return an `EmbedAndHead` that runs both on them."""
        params, grads, stored = map(without_blocks, (self.layout.params, self.layout.grads, self.params))
        weights = jax.tree.map(lambda p, g, x: self._move(p, g).gather(x), params, grads, stored)
        return EmbedAndHead(
            self.model.embed, self.model.head, weights, without_blocks(self.layout.trainable), self._rows, self._key,
            self.model.num_blocks + 1,
        )  # fmt: skip

    def with_loss_weights(self, embed_and_head: EmbedAndHead, loss: Program) -> EmbedAndHead:
        """Return a copy of `embed_and_head` with its `loss_weights`, summed over all micro-batches and devices.

        `loss` is the traced loss of a micro-batch. Collectives: for each term of the loss one all-reduce of a scalar,
        over the mesh axes that split rows or sequence positions.
        """
        weights_of, x = loss.only(loss.out.value.weights), loss.args[2]  # no weight depends on `x`
        each = jax.vmap(lambda one: weights_of(*embed_and_head.rows_and_key(one), x))(
            jnp.arange(self.engine.microbatches)
        )
        weights = tuple(sum_scalar(x.sum(), self.layout.sum_axes) for x in each)
        return replace(embed_and_head, loss_weights=weights)

    def training_stages(self, embed_and_head: EmbedAndHead, policy: RematPolicy, *, recompute: bool = False) -> Stages:
        """Return this device's blocks for training.

        Args:
          embed_and_head: gives the shape of the blocks' activations.
          policy: the activations that a block's forward saves for its backward.
          recompute: save only the input of a chunk (a group of consecutive blocks); its backward then runs the chunk's
            forward again.
        """
        zero = jnp.int32(0)
        weights, x = jax.eval_shape(self._fetch_weights, zero), jax.eval_shape(embed_and_head.run_embed, zero)
        key = jax.eval_shape(self._key, zero, zero)
        block = self.model.named_block
        check_names(policy, block, weights, x, key)
        block = block if policy == "everything" else checkpoint_body(policy, block)
        trained = [grad is not None for grad in _leaves(self.layout.grads[BLOCKS])]
        return self._stages(split_block(block, weights, x, key, trained), recompute)

    def evaluation_stages(self) -> Stages:
        """Return this device's blocks for evaluation, whose forward saves nothing."""
        return self._stages(forward_only(self.model.block), False)

    def zero_grad_sums(self) -> GradSums:
        """Return zeros as accumulators for the gradients of this device's blocks, one array per trained weight.

        The first dimension of an accumulator counts the blocks of this device. With scatter="each" every gradient is
        reduced over devices before it is added, so an accumulator has the shape of the stored gradient. With
        scatter="end" only the sum is reduced, so an accumulator has the shape before the reduction.
        """
        axes, (chunks, each) = self.layout.manual_axes, self._chunks()

        def zeros(param: Placement, grad: Placement, dtype: Any) -> jax.Array:
            tail = grad.drop_first()
            mine = replace(tail, store=only_axes(tail.store, axes)).shard_shape(self.layout.mesh)
            used = used_shape(self.layout, param.drop_first())
            return jnp.zeros((chunks * each, *(used if self.engine.scatter == "end" else mine)), dtype)

        params, dtypes = _leaves(self.layout.params[BLOCKS]), [x.dtype for x in jax.tree.leaves(self.params[BLOCKS])]
        leaves = zip(params, _leaves(self.layout.grads[BLOCKS]), dtypes, strict=True)
        return [zeros(param, grad, dtype) for param, grad, dtype in leaves if param is not None and grad is not None]

    def zero_totals(self, embed_and_head: EmbedAndHead) -> Totals:
        """Return zeros as accumulators for the loss, the metrics, and the gradients of embedding and head."""

        def zeros(x: Any, param: Placement, trained: bool) -> jax.Array | None:
            return jnp.zeros(used_shape(self.layout, param), x.dtype) if trained else None

        of_all = self.layout.shapes.params, self.layout.params, self.layout.trainable
        return embed_and_head.zero_totals(jax.tree.map(zeros, *map(without_blocks, of_all)))

    def reduce_gradients(self, sums: GradSums, rest: PyTree) -> PyTree:
        """Sum the gradients over devices, and return this device's shards of all gradients as stored.

        Args:
          sums: this device's gradients of the blocks, one array per trained weight. They are reduced here only with
            scatter="end"; otherwise they were reduced before they were added.
          rest: this device's gradients of embedding and head, a tree with None for frozen weights. They are summed over
            the pipeline's axis too.
        """
        grads = iter(sums)

        def reduce_blocks(param: Placement, grad: Placement | None) -> jax.Array | None:
            if grad is None:
                return None
            mine = next(grads)
            # With scatter="each" `_add_gradients` has reduced them.
            if self.engine.scatter == "end":
                stack = partial(_stack_placement, mine.shape[0])
                mine = reduce_gradient(
                    self.layout, self.engine, stack(grad.drop_first()), mine, stack(param.drop_first())
                )
            return mine.reshape(grad.view.stored[0], 1, grad.view.stored[2], *mine.shape[1:])

        def reduce_rest(param: Placement, grad: Placement | None, x: Any) -> jax.Array | None:
            if grad is None:
                return None
            return reduce_gradient(self.layout, self.engine, grad, x, param, (self.pipe.axis,))

        params, placements = self.layout.params, self.layout.grads
        blocks = jax.tree.map(reduce_blocks, params[BLOCKS], placements[BLOCKS])
        return jax.tree.map(reduce_rest, without_blocks(params), without_blocks(placements), rest) | {BLOCKS: blocks}

    def first_row(self, microbatch: jax.Array) -> jax.Array:
        """Return the global index of a micro-batch's first row."""
        axes = self.layout.batch_axes
        before = lax.axis_index(axes) * self.engine.microbatches if axes else 0
        return (before + microbatch) * self._microbatch_rows()

    def _stages(self, block: SplitBlock, recompute: bool) -> Stages:
        each = self._chunks()[1]
        return Stages(block, self._fetch_weights, self._block_number, self._key, self._add_gradients, each, recompute)

    def _chunks(self) -> tuple[int, int]:
        """Return (number of chunks per device, number of blocks per chunk)."""
        chunks, _, each = jax.tree.leaves(self.layout.params[BLOCKS])[0].view.stored[:3]
        return chunks, each

    def _fetch_weights(self, index: jax.Array) -> PyTree:
        """Gather the weights of one block; `index` counts the blocks of this device."""

        def fetch(move: Move, x: jax.Array) -> jax.Array:
            stack = x.reshape(-1, *x.shape[3:])
            return move.gather(lax.dynamic_index_in_dim(stack, index, keepdims=False))

        leaves, tree = jax.tree.flatten(self.params[BLOCKS])
        moves = [move for move, _ in self._block_moves()]
        return jax.tree.unflatten(tree, [fetch(*pair) for pair in zip(moves, leaves, strict=True)])

    def _add_gradients(self, sums: GradSums, index: jax.Array, new: list[Any], active: jax.Array) -> GradSums:
        """Add the gradients `new` of this device's block `index` to the sums, or zeros if `active` is False.

        Each gradient is reduced over devices first, unless scatter="end".
        """

        def add(sums: jax.Array, x: Any, move: Move) -> jax.Array:
            if x is None:
                return sums
            # First cast to the parameter's dtype: computing in bf16 does not imply reducing in bf16.
            return sums.at[index].add(move.reduce(jnp.where(active, x, 0).astype(sums.dtype)))

        moves = [move for move, is_trained in self._block_moves() if is_trained]
        return [add(*leaf) for leaf in zip(sums, new, moves, strict=True)]

    def _block_moves(self) -> list[tuple[Move, bool]]:
        """Return for each parameter of the blocks (the `Move` of one block's weight, True if it is trained)."""
        pairs = zip(jax.tree.leaves(self.layout.params[BLOCKS]), _leaves(self.layout.grads[BLOCKS]), strict=True)
        return [(self._move(p.drop_first(), None if g is None else g.drop_first()), g is not None) for p, g in pairs]

    def _block_number(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the index in the model of this device's block `index`, False if this block is padding)."""
        _, each = self._chunks()
        chunk, place = index // each, index % each
        stage = chunk * axis_size(self.layout.mesh, self.pipe.axis) + lax.axis_index(self.pipe.axis)
        number = stage * each + place
        # Clamped, so that padding has a valid key too; its result is dropped.
        return jnp.minimum(number, self.model.num_blocks - 1), number < self.model.num_blocks

    def _move(self, param: Placement, grad: Placement | None) -> Move:
        return make_move(self.layout, self.engine)(param, grad)

    def _rows(self, microbatch: jax.Array) -> PyTree:
        """Return a micro-batch: a contiguous slice of this device's rows."""
        size = self._microbatch_rows()

        def rows(x: jax.Array, has_rows: bool) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, microbatch * size, size) if has_rows else x

        return jax.tree.map(rows, self.batch, self.layout.rows_mask(self.batch))

    def _microbatch_rows(self) -> int:
        return row_count(select(self.layout.rows_mask(self.batch), self.batch)) // self.engine.microbatches

    def _key(self, call: jax.Array | int, microbatch: jax.Array) -> jax.Array | None:
        """Return the random key of one call of the model for a micro-batch; None in evaluation.

        Call 0 is the embedding, call i + 1 the block i, the last call the head. Each row draws the same random numbers
        as on a single device.
        """
        if self.key is None:
            return None
        return advance(jax.random.fold_in(self.key, call), self.first_row(microbatch))


def _leaves(placements: PyTree) -> list[Placement | None]:
    return jax.tree.leaves(placements, is_leaf=lambda x: x is None)


def _stack_placement(count: int, tail: Placement) -> Placement:
    """Return the placement of a stack of `count` arrays, each placed like `tail`, along a new, unsplit dimension 0."""
    view = View((count, *tail.view.logical), (count, *tail.view.padded), (count, *tail.view.stored))
    return Placement(view, PartitionSpec(None, *tail.use), PartitionSpec(None, *tail.store))
