"""A device's share of the blocks: one chunk forward, backward, and the halves of its backward.

A chunk is a run of blocks in a scan. Its gradients go into sums that hold all chunks of the device. Blocks that are
padding pass activations and cotangents through: both sides of every `where` are computed, and since the derivative is
taken block by block and never through a `where`, what a block of zeros makes (NaN even) reaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.types import PyTree
from jaxshard.engines.pipeline.split_backward import Arrays, Halves

Sums = list[jax.Array]
"""Of gradients: one array [blocks of the device, ...] per trained weight."""


@dataclass(frozen=True)
class Stages:
    """The blocks that this device holds, `each` per chunk, as programs of a chunk and a micro-batch.

    Attributes:
      halves: the programs of a block, all residuals kept or as many as its policy says.
      fetch: `fetch(place) -> weights` of the device's block at that place.
      number: `number(place) -> (place in the model, whether it is a block of it)`.
      key_of: `key_of(call, microbatch) -> key` of a call of the model, 1 for the first block.
      add: `add(sums, place, gradients, active) -> sums`; gradients that are None are left alone.
      each: blocks per chunk.
      recompute: keep the chunk's input alone and run it forward again in the backward pass.
    """

    halves: Halves
    fetch: Callable[[jax.Array], PyTree]
    number: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    key_of: Callable[[jax.Array, jax.Array], Any]
    add: Callable[[Sums, jax.Array, list[Any], jax.Array], Sums]
    each: int
    recompute: bool

    def forward(self, chunk: jax.Array, microbatch: jax.Array, x: PyTree) -> tuple[PyTree, Arrays]:
        """(the chunk's output, what its backward needs)."""
        y, kept = self._forward(chunk, microbatch, x)
        return y, jax.tree.leaves(x) if self.recompute else kept

    def _forward(self, chunk: jax.Array, microbatch: jax.Array, x: PyTree) -> tuple[PyTree, Arrays]:
        def block(x: PyTree, turn: jax.Array) -> tuple[PyTree, Arrays]:
            weights, key, real = self._block(chunk, microbatch, turn)
            y, kept = self.halves.forward(weights, x, key)
            return _where(real, y, x), kept

        return lax.scan(block, x, jnp.arange(self.each))

    def backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Arrays, dy: PyTree, sums: Sums, active: jax.Array
    ) -> tuple[PyTree, Sums]:
        """(the cotangent of the chunk's input, the sums with its gradients added where `active`)."""
        dx, sums, _ = self._backward(chunk, microbatch, kept, dy, sums, active, self._whole)
        return dx, sums

    def first(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Arrays, dy: PyTree, sums: Sums, active: jax.Array
    ) -> tuple[PyTree, Sums, Arrays]:
        """`backward` without the gradients that can wait, and what they need."""
        return self._backward(chunk, microbatch, kept, dy, sums, active, self.halves.first)

    def second(self, chunk: jax.Array, microbatch: jax.Array, carried: Arrays, sums: Sums, active: jax.Array) -> Sums:
        """The sums with the gradients added that waited."""

        def block(sums: Sums, turn: tuple[jax.Array, Arrays]) -> tuple[Sums, None]:
            place, values = turn
            weights, key, real = self._block(chunk, microbatch, place)
            grads = self.halves.second(weights, key, values)
            return self.add(sums, chunk * self.each + place, grads, active & real), None

        return lax.scan(block, sums, (jnp.arange(self.each), carried))[0]

    def _whole(self, weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[list[Any], PyTree, Arrays]:
        return *self.halves.backward(weights, key, kept, dy), []

    def _backward(
        self, chunk: jax.Array, microbatch: jax.Array, kept: Arrays, dy: PyTree, sums: Sums, active: jax.Array,
        half: Callable[..., tuple[list[Any], PyTree, Arrays]],
    ) -> tuple[PyTree, Sums, Arrays]:  # fmt: skip
        if self.recompute:
            x = jax.tree.unflatten(jax.tree.structure(dy), kept)
            kept = self._forward(chunk, microbatch, x)[1]

        def block(carry: tuple[PyTree, Sums], turn: tuple[jax.Array, Arrays]) -> tuple[tuple[PyTree, Sums], Arrays]:
            (dy, sums), (place, values) = carry, turn
            weights, key, real = self._block(chunk, microbatch, place)
            grads, dx, carried = half(weights, key, values, dy)
            sums = self.add(sums, chunk * self.each + place, grads, active & real)
            return (_where(real, dx, dy), sums), carried

        turns = (jnp.arange(self.each), kept)
        (dx, sums), carried = lax.scan(block, (dy, sums), turns, reverse=True)
        return dx, sums, carried

    def _block(self, chunk: jax.Array, microbatch: jax.Array, turn: jax.Array) -> tuple[PyTree, Any, jax.Array]:
        place = chunk * self.each + turn
        number, real = self.number(place)
        return self.fetch(place), self.key_of(number + 1, microbatch), real


def _where(real: jax.Array, x: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(real, a, b), x, other)
