"""The KV cache that attention uses while one part of a model runs: a block, the embedding or the head.

Generation activates a cache in a context, and `js.attention` reads and writes it, so the model's code does not mention
it. Rows may have different lengths: a key is stored in the slot of its position, and slots after a row's last position
are masked.

Shape suffixes: L blocks, B rows, S slots (one for each position that a row may have), K heads of keys and values, D
width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class Stored(NamedTuple):
    """The cached keys and values of one `js.attention` call in the model's code, for all blocks.

    Attributes:
      keys: [L, B, K, S, D].
      values: [L, B, K, S, width of a head of values].
    """

    keys: jax.Array
    values: jax.Array


class Slots(NamedTuple):
    """The size, dtype and sharding of the keys and values that one `js.attention` call adds to the cache.

    The widths are those of one position of one row in one block. The method `shapes` multiplies them by the numbers of
    blocks, rows and positions.

    Attributes:
      kv_heads: the number of heads of keys and values.
      widths: (width of a head of keys, width of a head of values).
      dtypes: (dtype of keys, dtype of values).
      spec: how the mesh splits the cached arrays: rows over the batch axes, heads as attention splits them.
    """

    kv_heads: int
    widths: tuple[int, int]
    dtypes: tuple[Any, Any]
    spec: PartitionSpec

    def shapes(self, blocks: int, rows: int, size: int) -> Stored:
        """Return the shapes of the cached keys and values, [blocks, rows, kv_heads, size, width].

        Args:
          blocks: the number of blocks of the model.
          rows: the number of rows.
          size: the number of slots per row: the most positions that a row may have.
        """
        made = [
            jax.ShapeDtypeStruct((blocks, rows, self.kv_heads, size, width), dtype)
            for width, dtype in zip(self.widths, self.dtypes)
        ]
        return Stored(*made)  # type: ignore[arg-type]


class Cache:
    """The KV cache of one part of a model (a block, the embedding or the head).

    It has an entry for each `js.attention` call of the part, in call order. A cache is made for one trace of the part.
    Its arrays are references (`jax.new_ref`), so that attention may run inside of `jax.jit`, `jax.checkpoint` or
    `jax.lax.cond` in the part.

    Args:
      count: how many new positions of each row the part computes.
      stored: references to the cached keys and values, one `Stored` per call. With None nothing is cached, and each
        call only records in `found` what it would cache.
      starts: int32[B], the index of the first new position of each row; None if it is 0, as in a prompt.
      block: the index of the block, in dimension L of the cached arrays.

    Attributes:
      found: for each call, the shapes and sharding that it would cache; filled if `stored` is None.
      asked_positions: True if the part called `js.positions`, which returns the same positions for all rows. Rows of
        different lengths are then generated in separate groups.
    """

    def __init__(
        self,
        count: int,
        stored: Sequence[Stored] | None,
        starts: jax.Array | None = None,
        block: jax.Array | int = 0,
    ) -> None:
        self.count, self.starts, self.block = count, starts, block
        self.stored = stored
        self.found: list[Slots] = []
        self.calls = 0
        self.asked_positions = False

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which `js.attention` uses this cache."""
        context: AbstractContextManager[None] = _current(self)
        return context

    def positions(self, count: int) -> jax.Array:
        """Return the indices of the new positions, int32[count], for `js.positions`, and set `asked_positions`.

        One result serves all rows, so all rows must have the same first new position.
        """
        self.asked_positions = True
        numbers = jnp.arange(count, dtype=jnp.int32)
        return numbers if self.starts is None else self.starts[0] + numbers


# A function that JAX traced under another cache, or without one, is traced again: caches are equal to themselves alone.
_current = jax.make_user_context(default_value=None)


def cache_in_force() -> Cache | None:
    """Return the cache of the enclosing context `Cache.in_force`; None outside of generation."""
    cache: Cache | None = _current.value
    return cache
