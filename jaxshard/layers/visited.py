"""The work of each device where a sequence is split: the pairs of blocks of queries and keys that its kernel visits."""

from __future__ import annotations

import jax.numpy as jnp

from jaxshard.layers.blockwise import Cut, Starts, block_size
from jaxshard.layers.formula import Extras, Form
from jaxshard.layers.splash_chunks import Blocks, visits
from jaxshard.layers.zigzag import chunk_starts


def visited_blocks(form: Form, length: int, devices: int, *, block: int | None = None, ring: bool = False) -> list[int]:
    """Count the pairs of blocks that each device visits in the forward pass, for one row and head.

    Args:
      form: causal, window.
      length: of the whole sequence.
      devices: over which it is split, in zigzag order.
      block: the largest block of `blockwise`; None counts those of the TPU kernel.
      ring: whether the keys come one device's after the other; only in blocks.
    """
    own = length // devices
    starts = [chunk_starts(i, devices, own) for i in range(devices)]
    if block is None:
        sizes = Blocks.of(own // 2, length)
        return [int(visits(form, mine, own, length, sizes).counts.sum()) for mine in starts]
    t = block_size(own // 2, block)
    if ring:
        cut, keys = Cut(own, own, t, t, 2, 2), starts
    else:
        cut, keys = Cut(own, length, t, block_size(length, block), 2, 1), [jnp.zeros(1, jnp.int32)]
    counts = [[cut.pairs(form, Extras(), Starts(mine, theirs))[1] for theirs in keys] for mine in starts]
    return [sum(int(count) for count in row if count is not None) for row in counts]
