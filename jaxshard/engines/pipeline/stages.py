"""The blocks of one device: a chunk of them forward, backward, and in the two halves of its backward.

The device's blocks are stored one chunk after the other, so block `turn` of a chunk has the local index
`chunk * blocks_per_chunk + turn`. With p = 2 devices, 2 chunks each, and 7 blocks of the model in chunks of 2:

    device 0:  local index  0 1 | 2 3        device 1:  local index  0 1 | 2 3
               chunk         0  |  1                    chunk         0  |  1
               block        0 1 | 4 5                   block        2 3 | 6 -        "-" is padding

A chunk runs its blocks in a `scan`: forward over 0, 1, ..., backward in reverse. What a block keeps is an output of the
forward's scan and an input of the backward's, [blocks_per_chunk, ...]; the gradients are added, in the carry, to sums
that hold all blocks of the device.

Padding passes activations and cotangents through: a block of zeros is computed like any other, and a `where` outside
the differentiated function drops its result. So a NaN that such a block makes is never multiplied by zero, and
reaches nothing.
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
"""Sums of gradients: one array [blocks of the device, ...] per trained weight of a block."""


class Slot(NamedTuple):
    """Values that a chunk left for later, in a slot of a buffer, every leaf [slots, ...].

    It is read where it is used, one block at a time: taken out first it would lie in memory twice.
    """

    buffer: PyTree
    slot: jax.Array

    def whole(self) -> PyTree:
        """Return the value."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.slot, keepdims=False), self.buffer)

    def of_block(self, turn: jax.Array) -> PyTree:
        """Return a block's part of a value whose leaves are stacks [blocks of a chunk, ...]."""

        def read(x: jax.Array) -> jax.Array:
            start: list[Any] = [self.slot, turn, *[0] * (x.ndim - 2)]
            return lax.dynamic_slice(x, start, (1, 1, *x.shape[2:])).reshape(x.shape[2:])

        return jax.tree.map(read, self.buffer)


@dataclass(frozen=True)
class Stages:
    """The blocks that this device holds, as programs of a chunk and a micro-batch (int32 scalars).

    Attributes:
      block: the programs of one block.
      fetch: `fetch(index) -> weights`, gathered, of the device's block at that local index.
      block_number: `block_number(index) -> (number of that block in the model, whether the model has it)`.
      key_of: `key_of(call, microbatch) -> key` of a call of the model, 1 for its first block.
      add_gradients: `add_gradients(sums, index, gradients, active) -> sums`; gradients that are None are left alone.
      blocks_per_chunk: how many blocks a chunk has.
      recompute: keep the chunk's input alone and run the chunk forward again in its backward.
    """

    block: SplitBlock
    fetch: Callable[[jax.Array], PyTree]
    block_number: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    key_of: Callable[[jax.Array, jax.Array], Any]
    add_gradients: Callable[[GradSums, jax.Array, list[Any], jax.Array], GradSums]
    blocks_per_chunk: int
    recompute: bool

    def forward(self, chunk: jax.Array, microbatch: jax.Array, x: PyTree) -> tuple[PyTree, Arrays]:
        """Return (the chunk's output, a tree like `x`; what its backward needs)."""
        y, kept = self._forward(chunk, microbatch, x)
        return y, jax.tree.leaves(x) if self.recompute else kept

    def backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Slot, dy: PyTree, sums: GradSums, active: jax.Array
    ) -> tuple[PyTree, GradSums]:
        """Return (the cotangent of the chunk's input, the sums with its gradients added where `active`)."""

        def whole(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[list[Any], PyTree, Arrays]:
            return *self.block.backward(weights, key, kept, dy), []

        dx, sums, _ = self._backward(whole, chunk, microbatch, kept, dy, sums, active)
        return dx, sums

    def input_backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Slot, dy: PyTree, sums: GradSums, active: jax.Array
    ) -> tuple[PyTree, GradSums, Arrays]:
        """As `backward`, without the gradients that can wait; also returns what these need."""
        return self._backward(self.block.input_backward, chunk, microbatch, kept, dy, sums, active)

    def weight_backward(
        self, chunk: jax.Array, microbatch: jax.Array, carried: Slot, sums: GradSums, active: jax.Array
    ) -> GradSums:
        """Return the sums with the gradients added, where `active`, that `input_backward` left out."""

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
        """The blocks' backwards in reverse; what each carries comes out stacked like what it kept."""
        if self.recompute:
            # Kept was the chunk's input alone; its other half, what each block keeps, is made again now.
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
        """(local index, weights, key, whether it is no padding) of block `turn` of a chunk."""
        index = chunk * self.blocks_per_chunk + turn
        number, real = self.block_number(index)
        return index, self.fetch(index), self.key_of(number + 1, microbatch), real


def _where(real: jax.Array, x: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(real, a, b), x, other)
