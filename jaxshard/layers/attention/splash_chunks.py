"""Run the TPU kernel on chunks of a sequence that is split over devices, with different blocks on each device.

Splash attention takes tables: for each block of queries, which blocks of keys to load, in order, and which of these
blocks to compute. JAX makes the tables on the host from a mask, the same for all devices. Here they are computed in the
program, from the start positions of the device's chunks; they are small, as they have an entry per block, not per
position. Inside a block the mask follows from the positions (`Sees`): the kernel receives the positions of the queries,
and counts the positions of the keys from 0.

No block crosses a boundary between chunks, so that all devices visit equally many blocks: chunks must be multiples of
128 positions.

Shape suffixes are explained in `formula.py`; I and J count blocks of queries and of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.layers.attention.blockwise import NAME, Starts
from jaxshard.layers.attention.formula import Extras, Form

_LANES = 128
_MOST = (1024, 2048, 512)
_MOST_OF_DQ = (512, 1024, 1024)
"""The largest block sizes: (queries, keys loaded at a time, keys computed at a time). `_MOST_OF_DQ` is for the gradient
of q, for which the kernel computes all loaded keys at a time. The blocks are large because skipping a block takes as
long as computing a block of 512 x 512 on a v5p, and a device skips about as many blocks as it visits."""


class Blocks(NamedTuple):
    """The block sizes of the TPU kernel.

    Attributes:
      queries: the number of queries in a block.
      keys: the number of keys that are loaded together.
      computed: the number of these keys that are computed together.
    """

    queries: int
    keys: int
    computed: int

    @classmethod
    def of(cls, chunk: int, keys: int) -> Blocks:
        """Choose block sizes for the forward pass.

        The block of queries divides `chunk`, the size of a chunk of queries; the blocks of keys divide `keys`, the
        number of keys.
        """
        return cls._of(chunk, keys, _MOST)

    @classmethod
    def of_dq(cls, chunk: int, keys: int) -> Blocks:
        """Choose block sizes for the kernel that computes the gradient of the queries.

        The block of queries divides `chunk`, the size of a chunk of queries; the blocks of keys divide `keys`, the
        number of keys.
        """
        return cls._of(chunk, keys, _MOST_OF_DQ)

    @classmethod
    def _of(cls, chunk: int, keys: int, most: tuple[int, int, int]) -> Blocks:
        loaded = _largest(keys, most[1])
        return cls(_largest(chunk, most[0]), loaded, _largest(loaded, most[2]))


class Visits(NamedTuple):
    """The blocks of keys that the kernel loads, in order, for each of I blocks of queries.

    For the gradients of keys and values: the blocks of queries that it loads for each of I blocks of keys.

    Attributes:
      next: int32[I, width], the index of the block to load in each iteration.
      counts: bool[I, width], False for an iteration that computes nothing.
    """

    next: jax.Array
    counts: jax.Array


class Sees(NamedTuple):
    """The mask function of the TPU kernel: (positions of queries, positions of keys) -> bool, True for a seen key.

    Attributes:
      causal: a query sees no later keys.
      window: a query sees keys less than this many positions away; None for no limit.
    """

    causal: bool
    window: int | None

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        if self.window is None:
            assert self.causal, "without a mask the kernel is given none"
            return queries >= keys
        seen = queries >= keys if self.causal else keys - queries < self.window
        return seen & (queries - keys < self.window)


def why_not_chunks(chunk: int) -> str:
    """Return why the TPU kernel can't compute chunks of `chunk` positions; "" if it can."""
    return "" if chunk % _LANES == 0 else f"chunks of {chunk} positions; it takes multiples of {_LANES}"


def splash_chunks(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    extras: Extras,
    form: Form,
    *,
    starts: Starts,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of some chunks of queries to all keys, causal or with a window, by the TPU kernel.

    Args:
      q_BTHD: this device's chunks of the sequence of queries, concatenated.
      k_BSKD: all keys, in the order of the sequence.
      v_BSKE: all values, in the same order.
      extras: segment ids or nothing.
      form: static arguments, such as `causal`.
      starts: `starts.queries` has the positions at which the chunks begin in the full sequence.
      interpret: run the kernel without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    T, S, E = q_BTHD.shape[1], k_BSKD.shape[1], v_BSKE.shape[-1]
    chunk = T // starts.queries.size
    blocks, of_dq = Blocks.of(chunk, S), Blocks.of_dq(chunk, S)
    q_BHTD, k_BKSD, v_BKSE = heads_first(q_BTHD, scale=True), heads_first(k_BSKD), heads_first(v_BSKE)
    kernel: Any = kernels.SplashAttentionKernel(
        *tables(form, starts.queries, T, S, blocks, of_dq),
        block_sizes=block_sizes(blocks, of_dq),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=form.soft_cap,
        residual_checkpoint_name=NAME,
        mask_function=Sees(form.causal, form.window),
        interpret=interpret,
    )
    if extras.segments is None:
        out_BHTE = jax.vmap(kernel)(q_BHTD, k_BKSD, v_BKSE)
    else:
        ids = jax.tree.map(lambda x: x.astype(jnp.int32), (extras.segments, extras.of_keys()))
        out_BHTE = jax.vmap(kernel)(q_BHTD, k_BKSD, v_BKSE, kernels.SegmentIds(*ids))
    out: jax.Array = out_BHTE.swapaxes(1, 2)[..., :E]
    return out


def heads_first(x_BTHD: jax.Array, *, scale: bool = False) -> jax.Array:
    """Transpose [B, T, H, D] to the TPU kernel's layout [B, H, T, D], with D padded to a multiple of 128.

    With `scale`, also divide by sqrt(D), which the kernel does not do itself.
    """
    D = x_BTHD.shape[-1]
    if scale:
        x_BTHD = (x_BTHD.astype(jnp.float32) / D**0.5).astype(x_BTHD.dtype)
    x_BTHD = jnp.pad(x_BTHD, ((0, 0),) * 3 + ((0, -D % _LANES),)) if D % _LANES else x_BTHD
    return x_BTHD.swapaxes(1, 2)


def _largest(length: int, most: int) -> int:
    """Return the largest multiple of 128, up to `most`, that divides `length`."""
    return next(size for size in range(most, 0, -_LANES) if length % size == 0)


# Tables


def visits(form: Form, starts: jax.Array, T: int, S: int, blocks: Blocks, *, of_keys: bool = False) -> Visits:
    """List the blocks of keys that the TPU kernel loads for each block of queries: all with a key that a query sees.

    Args:
      form: the call's static arguments; causality and the window are read.
      starts: the positions in the full sequence at which the chunks of queries begin.
      T: the number of queries.
      S: the number of keys, which begin at position 0.
      blocks: the block sizes.
      of_keys: list instead which blocks of queries the kernel loads for each block of keys.
    """
    in_chunk = T // starts.size // blocks.queries
    first = (starts[:, None] + jnp.arange(in_chunk) * blocks.queries).reshape(-1)
    first_key = jnp.arange(0, S, blocks.keys)
    seen_IJ = form.sees(first[:, None], first[:, None] + blocks.queries - 1, first_key, first_key + (blocks.keys - 1))
    seen = jnp.broadcast_to(seen_IJ, (first.size, first_key.size))
    if of_keys:
        seen = seen.T
    rows, columns = seen.shape
    width = columns
    if form.window is not None and not of_keys:  # a window reaches at most this many consecutive blocks of keys
        reach = blocks.queries + form.window - 1 + (0 if form.causal else form.window - 1)
        width = min(columns, (reach - 2) // blocks.keys + 2)
    # The visited blocks of a row are consecutive: begin .. begin + count - 1.
    begin, count = seen.argmax(1), seen.sum(1)
    iteration = jnp.arange(width)
    counts = iteration < count[:, None]
    # An iteration that computes nothing prefetches the block of the next iteration that does: a minimum from the right.
    flat = jnp.where(counts, begin[:, None] + iteration, columns).reshape(-1)
    turns = jnp.where(flat < columns, jnp.arange(flat.size), flat.size)
    following = jax.lax.cummin(turns, reverse=True)
    next = jnp.where(following < flat.size, flat[jnp.minimum(following, flat.size - 1)], 0)
    return Visits(next.reshape(rows, width).astype(jnp.int32), counts)


def tables(form: Form, starts: jax.Array, T: int, S: int, blocks: Blocks, of_dq: Blocks) -> tuple[Any, Any, Any]:
    """Return splash attention's tables for (the forward pass, the gradient of q, the gradients of k and v).

    A table (`MaskInfo`) says which blocks the kernel loads, in order, and which it computes.

    Args:
      form: the call's static arguments; causality and the window are read.
      starts: the positions in the full sequence at which the chunks of queries begin.
      T: the number of queries.
      S: the number of keys.
      blocks: the block sizes for the forward pass and for the gradients of k and v.
      of_dq: the block sizes for the gradient of q.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    each = T // starts.size
    positions_T = (starts[:, None] + jnp.arange(each)).reshape(T).astype(jnp.int32)

    def table(found: Visits, transpose: bool) -> Any:
        # The tables are in scalar memory, which is small: use the smallest dtype.
        small = jnp.int16 if max(T, S) < 2**15 * _LANES else jnp.int32
        next, counts = found.next.astype(small), found.counts.astype(jnp.int8)
        if transpose:
            next, counts = next.T, counts.T
        return MaskInfo(next[None], None, counts[None], None, positions_T)  # type: ignore[arg-type]

    by_query, by_query_dq = (table(visits(form, starts, T, S, sizes), False) for sizes in (blocks, of_dq))
    return by_query, by_query_dq, table(visits(form, starts, T, S, blocks, of_keys=True), True)


def block_sizes(blocks: Blocks, of_dq: Blocks) -> Any:
    """Convert the block sizes to splash attention's own type, `BlockSizes`.

    `of_dq` are the block sizes for the gradient of q, `blocks` all others.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    return BlockSizes(
        block_q=blocks.queries,
        block_kv=blocks.keys,
        block_kv_compute=blocks.computed,
        block_q_dkv=blocks.queries,
        block_kv_dkv=blocks.keys,
        block_kv_dkv_compute=blocks.computed,
        block_q_dq=of_dq.queries,
        block_kv_dq=of_dq.keys,
    )
