"""Count the work of each device under context parallelism: the pairs of blocks that its kernel visits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxshard.layers.attention.blockwise import Cut, Starts, block_size
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.splash_chunks import Blocks, visits
from jaxshard.layers.attention.zigzag import chunk_starts


def visited_blocks(form: Form, length: int, devices: int, *, block: int | None = None, ring: bool = False) -> list[int]:
    """Count the pairs (block of queries, block of keys) that each device computes in the forward pass.

    The pairs are those of one row and one head, under context parallelism.

    Args:
      form: the call's static arguments; causality and the window are read.
      length: the length of the full sequence.
      devices: the number of devices over which the sequence is split, in zigzag order.
      block: the largest block size of `blockwise`; None counts the blocks of the TPU kernel.
      ring: count the blocks of ring attention; needs `block`.

    Returns:
      The number of pairs for each device.
    """
    own = length // devices
    starts = jax.vmap(lambda i: chunk_starts(i, devices, own))(jnp.arange(devices))
    t = block_size(own // 2, block or length)

    def count(mine: jax.Array) -> jax.Array:
        if block is None:
            return visits(form, mine, own, length, Blocks.of(own // 2, length)).counts.sum()
        if ring:
            cut, keys = Cut(own, own, t, t, 2, 2), starts
        else:
            cut, keys = Cut(own, length, t, block_size(length, block), 2, 1), jnp.zeros((1, 1), jnp.int32)
        _, counts = jax.vmap(lambda theirs: cut.pairs(form, Extras(), Starts(mine, theirs)))(keys)
        assert counts is not None
        return counts.sum()

    return [int(found) for found in jax.jit(jax.vmap(count))(starts)]
