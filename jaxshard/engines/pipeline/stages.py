"""Run the blocks of one device: the forward, the backward, and the two halves of the backward of a chunk.

The device's blocks are stored chunk by chunk, so block `turn` of a chunk has the local index
`chunk * blocks_per_chunk + turn`. With p = 2 devices, 2 chunks each, and 7 blocks of the model in chunks of 2:

    device 0:  local index  0 1 | 2 3        device 1:  local index  0 1 | 2 3
               chunk         0  |  1                    chunk         0  |  1
               block        0 1 | 4 5                   block        2 3 | 6 -        "-" is padding

A chunk runs its blocks in a `scan`: forward over 0, 1, ..., backward in reverse. The residuals of a block are an output
of the forward's scan and an input of the backward's, [blocks_per_chunk, ...]; the gradients are added to sums for all
blocks of the device, which are in the scan carry.

Padding passes activations and cotangents through: a block of zeros is computed like any other, and a `where` outside
the differentiated function drops its result. So a NaN from such a block is never multiplied by zero, and has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.types import PyTree
from jaxshard.engines.pipeline.split_backward import Arrays, SplitBlock

GradSums = list[jax.Array]
"""Gradient accumulators: one array [blocks of the device, ...] per trained weight of a block."""


class Slot(NamedTuple):
    """One slot of a buffer, with the values that a chunk (a group of consecutive blocks) saved.

    The values are read where they are used, one block at a time, because reading all values first would need their
    memory twice.

    Attributes:
      buffer: a tree of arrays [slots, ...].
      slot: the index of the slot.
    """

    buffer: PyTree
    slot: jax.Array

    def whole(self) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.slot, keepdims=False), self.buffer)

    def of_block(self, turn: jax.Array) -> PyTree:
        """Read the values of block number `turn` of the chunk, from a slot with arrays [blocks of a chunk, ...]."""

        def read(x: jax.Array) -> jax.Array:
            start: list[Any] = [self.slot, turn, *[0] * (x.ndim - 2)]
            return lax.dynamic_slice(x, start, (1, 1, *x.shape[2:])).reshape(x.shape[2:])

        return jax.tree.map(read, self.buffer)


@dataclass(frozen=True)
class Stages:
    """This device's blocks, as functions of a chunk (a group of consecutive blocks) and a micro-batch, int32 scalars.

    Attributes:
      block: the programs of one block.
      fetch: `fetch(index)` gathers the weights of a block; `index` counts the blocks of this device.
      block_number: `block_number(index) -> (index of that block in the model, False if it is padding)`.
      key_of: `key_of(call, microbatch)` returns a random key; the call of the model's block i is i + 1.
      add_gradients: `add_gradients(sums, index, gradients, active) -> sums`; gradients that are None are skipped.
      blocks_per_chunk: the number of blocks of a chunk.
      recompute: keep only the chunk's input, and run the chunk's forward again in its backward.
    """

    block: SplitBlock
    fetch: Callable[[jax.Array], PyTree]
    block_number: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    key_of: Callable[[jax.Array, jax.Array], Any]
    add_gradients: Callable[[GradSums, jax.Array, list[Any], jax.Array], GradSums]
    blocks_per_chunk: int
    recompute: bool

    def forward(self, chunk: jax.Array, microbatch: jax.Array, x: PyTree) -> tuple[PyTree, Arrays]:
        """Run a chunk forward. Return (its output, a tree like `x`; the residuals for its backward)."""
        y, kept = self._forward(chunk, microbatch, x)
        return y, jax.tree.leaves(x) if self.recompute else kept

    def backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Slot, dy: PyTree, sums: GradSums, active: jax.Array
    ) -> tuple[PyTree, GradSums]:
        """Run a chunk backward.

        Args:
          chunk: the index of the chunk on this device.
          microbatch: the index of the micro-batch.
          kept: the residuals that `forward` returned.
          dy: the cotangent of the chunk's output.
          sums: accumulators for the gradients of the blocks' weights.
          active: if False, nothing is added to `sums`.

        Returns:
          (the cotangent of the chunk's input, the new sums).
        """

        def whole(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[list[Any], PyTree, Arrays]:
            return *self.block.backward(weights, key, kept, dy), []

        dx, sums, _ = self._backward(whole, chunk, microbatch, kept, dy, sums, active)
        return dx, sums

    def input_backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Slot, dy: PyTree, sums: GradSums, active: jax.Array
    ) -> tuple[PyTree, GradSums, Arrays]:
        """Run a chunk backward like `backward`, but leave gradients of weights that can wait to `weight_backward`.

        Return (the cotangent of the chunk's input, the new sums, the values that `weight_backward` needs).
        """
        return self._backward(self.block.input_backward, chunk, microbatch, kept, dy, sums, active)

    def weight_backward(
        self, chunk: jax.Array, microbatch: jax.Array, carried: Slot, sums: GradSums, active: jax.Array
    ) -> GradSums:
        """Compute the gradients of weights that `input_backward` left out, and add them to `sums` if `active`.

        `carried` are the values that `input_backward` returned. Return the new sums.
        """

        def block(sums: GradSums, turn: jax.Array) -> tuple[GradSums, None]:
            index, weights, key, real = self._block(chunk, microbatch, turn)
            grads = self.block.weight_backward(weights, key, carried.of_block(turn))
            return self.add_gradients(sums, index, grads, active & real), None

        return lax.scan(block, sums, jnp.arange(self.blocks_per_chunk))[0]

    def _forward(self, chunk: jax.Array, microbatch: jax.Array, x: PyTree) -> tuple[PyTree, Arrays]:
        def block(x: PyTree, turn: jax.Array) -> tuple[PyTree, Arrays]:
            _, weights, key, real = self._block(chunk, microbatch, turn)
            y, kept = self.block.forward(weights, x, key)
            return _where(real, y, x), kept

        return lax.scan(block, x, jnp.arange(self.blocks_per_chunk))

    def _backward(
        self, block_backward: Callable[..., tuple[list[Any], PyTree, Arrays]], chunk: jax.Array,
        microbatch: jax.Array, kept: Slot, dy: PyTree, sums: GradSums, active: jax.Array,
    ) -> tuple[PyTree, GradSums, Arrays]:  # fmt: skip
        """Run `block_backward` for each block of a chunk, the last block first; for the arguments see `backward`.

        Return (the cotangent of the chunk's input, the new sums, the values that the blocks carry to `weight_backward`,
        each [blocks of a chunk, ...]).
        """
        if self.recompute:
            # Only the chunk's input was kept; compute the residuals of each block again.
            x = jax.tree.unflatten(jax.tree.structure(dy), kept.whole())
            _, again = self._forward(chunk, microbatch, x)
            kept = Slot([values[None] for values in again], jnp.int32(0))

        def block(carry: tuple[PyTree, GradSums], turn: jax.Array) -> tuple[tuple[PyTree, GradSums], Arrays]:
            dy, sums = carry
            index, weights, key, real = self._block(chunk, microbatch, turn)
            grads, dx, carried = block_backward(weights, key, kept.of_block(turn), dy)
            # Sums are in the carry rather than stacked outputs: one set for all chunks and micro-batches.
            sums = self.add_gradients(sums, index, grads, active & real)
            return (_where(real, dx, dy), sums), carried

        (dx, sums), carried = lax.scan(block, (dy, sums), jnp.arange(self.blocks_per_chunk), reverse=True)
        return dx, sums, carried

    def _block(
        self, chunk: jax.Array, microbatch: jax.Array, turn: jax.Array
    ) -> tuple[jax.Array, PyTree, Any, jax.Array]:
        """Return (index on this device, gathered weights, random key, False if padding) of block `turn` of a chunk."""
        index = chunk * self.blocks_per_chunk + turn
        number, real = self.block_number(index)
        return index, self.fetch(index), self.key_of(number + 1, microbatch), real


def _where(real: jax.Array, x: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(real, a, b), x, other)
