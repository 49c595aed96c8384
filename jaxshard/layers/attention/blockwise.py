"""Compute attention in blocks with an online softmax: exact, with memory linear in the sequence length.

Queries and keys are split into blocks, and a scan iterates over the pairs of blocks that may see each other:

    4 blocks, causal    keys 0 1 2 3       pairs (0,0) (1,0) (1,1) (2,0) (2,1) (2,2) (3,0) (3,1) (3,2) (3,3)
             queries 0       x
                     1       x x           scan carry per query: the largest logit so far, the sum of
                     2       x x x         exp(logit - largest), and the sum of exp(logit - largest) * value
                     3       x x x x

The backward pass recomputes the logits of every pair from q and k. The largest intermediate array holds the logits of
one pair, [B, H, block, block]. Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao et al.
2022, "FlashAttention", appendix B.

If a sequence is split over devices, a device's queries and keys are some chunks of the sequence (`Starts`). Then the
pairs differ between devices, and so does the number of loop iterations.

Shape suffixes are explained in `formula.py`. Here also: N and M count the blocks of queries and of keys, t and s the
positions in a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxshard.layers.attention.formula import UNSEEN, Extras, Form, add_bias, by_group, cap, drop, visible

NAME = "attention_out"
"""The name, for `jax.checkpoint_policies`, of the output and of all residuals of the backward pass except q, k, v."""

_MOST_LOGITS = 2**24
"""The most logits of a pair of blocks, over all rows and heads: 64 MB in f32."""

Pair = tuple[jax.Array, jax.Array]
"""(index of a block of queries, index of a block of keys)."""


class Starts(NamedTuple):
    """The positions in the full sequence at which this device's chunks begin, if the sequence is split over devices.

    Attributes:
      queries: int[chunks], the starts of its equal chunks of queries.
      keys: int[chunks], the starts of its equal chunks of keys.
    """

    queries: jax.Array
    keys: jax.Array


def blockwise(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    extras: Extras,
    form: Form,
    *,
    block: int = 512,
    starts: Starts | None = None,
) -> jax.Array:
    """Compute attention in blocks of at most `block` positions; differentiable by `jax.grad`, but not by `jax.jvp`.

    Args:
      q_BTHD: queries.
      k_BSKD: keys.
      v_BSKE: values.
      extras: optional arrays, such as bias and segment ids.
      form: static arguments, such as `causal` and the window.
      block: the largest block size.
      starts: where this device's chunks of the sequence begin, if the sequence is split over devices. Bias, mask and
        dropout are then supported only for a single chunk of queries and a single chunk of keys.
    """
    cut = Cut.of(q_BTHD, k_BSKD, block, starts)
    return cut.join(_attend(cut, form, *cut.arrays(q_BTHD, k_BSKD, v_BSKE), cut.extras(extras, k_BSKD), starts))


def partial_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    extras: Extras,
    form: Form,
    *,
    starts: Starts,
    block: int = 512,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention to some of a sequence's keys, so that results for several sets of keys can be combined.

    Not differentiable: `partial_gradients` is its backward pass. `starts` has the positions in the full sequence at
    which these chunks of queries and keys begin; for the other arguments see `blockwise`.

    Returns:
      (output [B, T, H, E], largest [B, T, H], total [B, T, H]): `largest` is each query's largest logit, and `total`
      its sum of exp(logit - largest) over these keys.
    """
    cut = Cut.of(q_BTHD, k_BSKD, block, starts)
    arrays = cut.arrays(q_BTHD, k_BSKD, v_BSKE)
    out, *sums = _closed_forward(cut, form, *arrays, cut.extras(extras, k_BSKD), starts)
    largest, total = (cut.join(x[..., None])[..., 0] for x in sums)
    return cut.join(out), largest, total


def partial_gradients(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    extras: Extras,
    form: Form,
    out_BTHE: jax.Array,
    largest_BTH: jax.Array,
    total_BTH: jax.Array,
    d_out_BTHE: jax.Array,
    *,
    starts: Starts,
    block: int = 512,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of attention that come from some of a sequence's keys.

    Args:
      q_BTHD: queries.
      k_BSKD: some of the keys.
      v_BSKE: their values.
      extras: optional arrays, such as segment ids.
      form: static arguments, such as `causal`.
      out_BTHE: the output of attention to all keys.
      largest_BTH: each query's largest logit over all keys.
      total_BTH: each query's sum of exp(logit - largest) over all keys.
      d_out_BTHE: the gradient with respect to the output.
      starts: where these chunks of queries and keys begin in the full sequence.
      block: the largest block size.

    Returns:
      (the part of q's gradient that comes from these keys, the gradients of these keys and values), in f32.
    """
    cut = Cut.of(q_BTHD, k_BSKD, block, starts)
    K = k_BSKD.shape[2]
    out, d_out = (cut.queries(x, K) for x in (out_BTHE, d_out_BTHE))
    largest, total = (cut.queries(x[..., None], K)[..., 0] for x in (largest_BTH, total_BTH))
    total = jnp.where(total > 0, total, 1)  # padded queries have a total of 0
    kept = *cut.arrays(q_BTHD, k_BSKD, v_BSKE), cut.extras(extras, k_BSKD), starts
    dq, dk, dv, _ = _gradients(cut, form, (*kept, out, largest, total), d_out)
    return cut.join(dq), cut.join_keys(dk), cut.join_keys(dv)


def block_size(length: int, largest: int) -> int:
    """Return the block size that splits `length` positions into the fewest equal blocks of about `largest` at most.

    The size is a multiple of 16, so it may exceed `largest` by up to 15. The last block may be partly empty.
    """
    blocks = -(-length // largest)
    return -(-length // (16 * blocks)) * 16


class Cut(NamedTuple):
    """The division of T queries into blocks of t positions, and of S keys into blocks of s positions.

    Queries and keys each consist of equal chunks (one chunk by default) with blocks of their own; the last block of a
    chunk is padded. A `side` is 0 for queries and 1 for keys, and methods index the fields by it: self[side] is T or S,
    self[2 + side] is t or s, self[4 + side] is the number of chunks.
    """

    T: int
    S: int
    t: int
    s: int
    query_chunks: int = 1
    key_chunks: int = 1

    @classmethod
    def of(cls, q_BTHD: jax.Array, k_BSKD: jax.Array, block: int, starts: Starts | None) -> Cut:
        """Choose blocks of at most `block` positions, and smaller blocks if there are many rows and heads."""
        (B, T, H, _), S = q_BTHD.shape, k_BSKD.shape[1]
        chunks = (1, 1) if starts is None else (starts.queries.size, starts.keys.size)
        while block > 128 and B * H * block**2 > _MOST_LOGITS:
            block //= 2
        return cls(T, S, block_size(T // chunks[0], block), block_size(S // chunks[1], block), *chunks)

    def arrays(self, q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array) -> tuple[jax.Array, ...]:
        """Split q into N blocks [N, B, K, G, t, D], and k and v into M blocks [M, B, K, s, D] and [M, B, K, s, E].

        K is the number of heads of keys, and G the number of query heads that share one of them.
        """
        keys = (self.split(x.swapaxes(1, 2), 1) for x in (k_BSKD, v_BSKE))
        return self.queries(q_BTHD, k_BSKD.shape[2]), *keys

    def queries(self, x_BTHD: jax.Array, kv_heads: int) -> jax.Array:
        """Split an array of queries, [B, T, H, D], into N blocks: [N, B, K, G, t, D].

        K is `kv_heads`, the number of heads of keys, and G = H / K query heads share one of them.
        """
        B, T, H, D = x_BTHD.shape
        return self.split(x_BTHD.reshape(B, T, kv_heads, H // kv_heads, D).transpose(0, 2, 3, 1, 4), 0)

    def extras(self, extras: Extras, k_BSKD: jax.Array) -> Extras:
        """Pad bias, mask, segment ids and dropout bits to full blocks, so that `of_pair` can slice them."""
        K, keys = k_BSKD.shape[2], extras.of_keys()
        return Extras(
            segments=None if extras.segments is None else self.pad(extras.segments, 1, 0),
            bias=None if extras.bias is None else self.pad_pairs(by_group(extras.bias, K)),
            mask=None if extras.mask is None else self.pad_pairs(by_group(extras.mask, K)),
            keep=None if extras.keep is None else self.pad_pairs(extras.keep),
            key_segments=None if keys is None else self.pad(keys, 1, 1),
            windows=extras.windows,
        )

    def join(self, x_NBKGtE: jax.Array) -> jax.Array:
        """Join blocks of queries, [N, B, K, G, t, E], to [B, T, H, E], without the padding."""
        x_BKGTE = self._join(x_NBKGtE, 0)
        B, K, G, T, E = x_BKGTE.shape
        return x_BKGTE.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, E)

    def join_keys(self, x_MBKsD: jax.Array) -> jax.Array:
        """Join blocks of keys, [M, B, K, s, D], to [B, S, K, D], without the padding."""
        return self._join(x_MBKsD, 1).swapaxes(1, 2)

    def _join(self, x: jax.Array, side: int) -> jax.Array:
        chunks, length = self[4 + side], self[side]
        x = jnp.moveaxis(x, 0, -3)
        x = x.reshape(*x.shape[:-3], chunks, -1, x.shape[-1])[..., : length // chunks, :]
        return x.reshape(*x.shape[:-3], length, x.shape[-1])

    def first(self, side: int, block: Any, starts: Starts | None) -> Any:
        """Return the position, in the full sequence, of the first query or key of a block.

        Args:
          side: 0 for a block of queries, 1 for a block of keys.
          block: the index of the block, or an array of indices.
          starts: where this device's chunks of the sequence begin; None if it has the full sequence.
        """
        size = self[2 + side]
        if starts is None:
            return block * size
        each = -(-self[side] // self[4 + side] // size)  # blocks of a chunk
        return starts[side][block // each] + block % each * size

    def pad(self, x: jax.Array, dim: int, side: int) -> jax.Array:
        """Pad each chunk along dimension `dim` with zeros to a multiple of the block size.

        `side` is 0 if the dimension has queries, 1 if it has keys.
        """
        chunks = self[4 + side]
        length = x.shape[dim] // chunks
        if not (missing := -length % self[2 + side]):
            return x
        x = x.reshape(*x.shape[:dim], chunks, length, *x.shape[dim + 1 :])
        x = jnp.pad(x, [(0, missing if d == dim + 1 else 0) for d in range(x.ndim)])
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])

    def split(self, x: jax.Array, side: int) -> jax.Array:
        """Pad and split [..., length, D] into blocks, [blocks, ..., block size, D].

        `side` is 0 if the length counts queries, 1 if it counts keys.
        """
        x, size = self.pad(x, x.ndim - 2, side), self[2 + side]
        return jnp.moveaxis(x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1]), -3, 0)

    def pad_pairs(self, x: jax.Array) -> jax.Array:
        """Pad queries and keys of an array [..., T or 1, S or 1] to multiples of the block sizes; a size of 1 stays."""
        for side, dim in enumerate((x.ndim - 2, x.ndim - 1)):
            if x.shape[dim] > 1:
                x = self.pad(x, dim, side)
        return x

    def of_pair(self, x: jax.Array, pair: Pair) -> jax.Array:
        """Slice the block of queries and the block of keys of `pair` out of a padded array [..., T or 1, S or 1]."""
        for side, dim in enumerate((x.ndim - 2, x.ndim - 1)):
            if x.shape[dim] > 1:
                x = jax.lax.dynamic_slice_in_dim(x, pair[side] * self[2 + side], self[2 + side], dim)
        return x

    def add_to_pair(self, sum: jax.Array, x: jax.Array, pair: Pair) -> jax.Array:
        """Return `sum`, a padded array [..., T or 1, S or 1], with `x` added at one pair (query block, key block).

        Where `sum` has a dimension of size 1, `x` is summed over that dimension first.
        """
        dims = tuple(dim for dim, size in enumerate(sum.shape) if size == 1)
        x = x.sum(dims, keepdims=True)
        # Along T and S the pair's offset, but 0 along a dimension of size 1, over which x was summed.
        starts = [0] * (x.ndim - 2) + [i * size if n > 1 else 0 for i, size, n in zip(pair, self[2:4], sum.shape[-2:])]
        part = jax.lax.dynamic_slice(sum, starts, x.shape)
        return jax.lax.dynamic_update_slice(sum, part + x, starts)

    def pairs(self, form: Form, extras: Extras, starts: Starts | None = None) -> tuple[jax.Array, jax.Array | None]:
        """List the pairs (block of queries, block of keys) in which at least one query sees at least one key.

        Returns:
          (int32[pairs, 2], the number of pairs to compute). Without `starts` the number is None: compute all listed
          pairs. With `starts` the number is traced, since it differs between devices: compute only that many pairs from
          the start of the list, whose rest is padding.
        """
        # With a mask, a query that sees no key takes the mean of all values, so no pair may be skipped.
        every = extras.mask is not None
        sizes = [self[4 + side] * -(-self[side] // self[4 + side] // self[2 + side]) for side in range(2)]
        numbers = np.arange if starts is None else jnp.arange
        first, first_key = (self.first(side, numbers(n), starts) for side, n in enumerate(sizes))
        seen = form.sees(first[:, None], first[:, None] + self.t - 1, first_key, first_key + self.s - 1)
        if starts is None:
            return jnp.asarray(np.argwhere(np.broadcast_to(seen | every, sizes)), jnp.int32), None
        seen = jnp.broadcast_to(seen | every, sizes)
        return jnp.argwhere(seen, size=seen.size).astype(jnp.int32), seen.sum(dtype=jnp.int32)


# Policies of `jax.checkpoint` also apply inside loops: "dots" would save the logits of every pair. They do not apply
# inside a custom_vjp call, so the forward pass is one. Its derivative is used for second derivatives only.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _closed_forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, starts: Starts | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _forward(cut, form, q, k, v, extras, starts)


def _open_forward(cut: Cut, form: Form, *args: Any) -> tuple[Any, Any]:
    return jax.vjp(partial(_forward, cut, form), *args)


def _pull_back(cut: Cut, form: Form, pullback: Any, cotangents: Any) -> Any:
    return pullback(cotangents)


_closed_forward.defvjp(_open_forward, _pull_back)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, starts: Starts | None
) -> jax.Array:
    return _forward(cut, form, q, k, v, extras, starts)[0]


def _attend_forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, starts: Starts | None
) -> tuple[jax.Array, Any]:
    out, largest, total = (checkpoint_name(x, NAME) for x in _closed_forward(cut, form, q, k, v, extras, starts))
    return out, (q, k, v, extras, starts, out, largest, total)


def _forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, starts: Starts | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention in blocks; return (output, the largest logit, the sum of exp(logit - largest)) of each query.

    The shapes, in N blocks of queries, are [N, B, K, G, t, E] for the output and [N, B, K, G, t] for the other two.
    `cut` says how queries and keys are divided into blocks.
    """
    per_query = q.shape[:-1]

    def add_pair(carry: tuple[jax.Array, ...], pair: Pair) -> tuple[jax.Array, ...]:
        n, m = pair
        largest, total, out = (x[n] for x in carry)
        logits, _, _ = _logits(cut, form, q, k, extras, starts, pair)
        new = jnp.maximum(largest, logits.max(-1))
        # Rescale the sums so far from the old maximum to the new one.
        weights, shrink = jnp.exp(logits - new[..., None]), jnp.exp(largest - new)
        total = total * shrink + weights.sum(-1)
        if extras.keep is not None:
            weights = drop(weights, cut.of_pair(extras.keep, pair), form)
        out = out * shrink[..., None] + _product("bkgts,bkse->bkgte", weights.astype(v.dtype), v[m], form)
        return tuple(x.at[n].set(mine) for x, mine in zip(carry, (new, total, out)))

    zeros = partial(jnp.zeros, dtype=jnp.float32)
    start = zeros(per_query) + UNSEEN, zeros(per_query), zeros((*per_query, v.shape[-1]))
    largest, total, out = _over_pairs(cut, form, extras, starts, add_pair, start)
    # With `starts` a query may see none of this device's keys: avoid 0 / 0.
    counted = total if starts is None else jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return (out / counted[..., None]).astype(v.dtype), largest, total


def _attend_backward(
    cut: Cut, form: Form, kept: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Extras, None]:
    q, k, v, extras, *_ = kept
    dq, dk, dv, d_bias = _gradients(cut, form, kept, d_out)
    d_extras = Extras(bias=None if d_bias is None else d_bias.astype(extras.bias.dtype))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_extras, None


_attend.defvjp(_attend_forward, _attend_backward)


def _gradients(
    cut: Cut, form: Form, kept: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of q, k, v and the bias, in f32; the last is None if there is no bias.

    `kept` are the residuals of the forward pass, and `d_out` is the gradient with respect to the output.
    """
    q, k, v, extras, starts, out, largest, total = kept
    # The sum over all keys of weights * d_weights, which the derivative of the softmax subtracts.
    dot = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)

    def add_pair(carry: tuple[Any, ...], pair: Pair) -> tuple[Any, ...]:
        n, m = pair
        dq, dk, dv, d_bias = carry
        logits, seen, slope = _logits(cut, form, q, k, extras, starts, pair)
        weights = jnp.exp(logits - largest[n][..., None]) / total[n][..., None]
        d_weights = _product("bkgte,bkse->bkgts", d_out[n], v[m], form)
        kept_weights = weights
        if extras.keep is not None:
            keep = cut.of_pair(extras.keep, pair)
            kept_weights, d_weights = drop(weights, keep, form), drop(d_weights, keep, form)
        dv = dv.at[m].add(_product("bkgts,bkgte->bkse", kept_weights.astype(v.dtype), d_out[n], form))
        d_logits = weights * (d_weights - dot[n][..., None])
        if seen is not None:
            d_logits = jnp.where(seen, d_logits, 0)
        if d_bias is not None:
            d_bias = cut.add_to_pair(d_bias, d_logits, pair)
        if slope is not None:
            d_logits = d_logits * slope
        d_logits = (d_logits / q.shape[-1] ** 0.5).astype(q.dtype)
        dq = dq.at[n].add(_product("bkgts,bksd->bkgtd", d_logits, k[m], form))
        dk = dk.at[m].add(_product("bkgts,bkgtd->bksd", d_logits, q[n], form))
        return dq, dk, dv, d_bias

    start = (*(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)), _zeros_or_none(extras.bias))
    dq, dk, dv, d_bias = _over_pairs(cut, form, extras, starts, add_pair, start)
    return dq, dk, dv, d_bias


def _over_pairs(cut: Cut, form: Form, extras: Extras, starts: Starts | None, body: Any, start: Any) -> Any:
    pairs, count = cut.pairs(form, extras, starts)
    if count is not None:
        return jax.lax.fori_loop(0, count, lambda i, carry: body(carry, (pairs[i, 0], pairs[i, 1])), start)
    carry, _ = jax.lax.scan(lambda carry, pair: (body(carry, (pair[0], pair[1])), None), start, pairs)
    return carry


def _logits(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, extras: Extras, starts: Starts | None, pair: Pair
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Compute the logits of one pair of a query block and a key block.

    Returns:
      (logits [B, K, G, t, s], the mask of the keys that each query sees, the derivative of the soft cap). The mask is
      None if all keys are seen, and the derivative is None if there is no soft cap.
    """
    (n, m), (t, s) = pair, (cut.t, cut.s)
    logits, slope = cap(_product("bkgtd,bksd->bkgts", q[n], k[m], form) / q.shape[-1] ** 0.5, form)
    if extras.bias is not None:
        logits = add_bias(logits, cut.of_pair(extras.bias, pair))
    queries, keys = (cut.first(side, pair[side], starts) + jnp.arange(size) for side, size in enumerate((t, s)))
    segments = mask = None
    if extras.segments is not None and extras.key_segments is not None:
        of_both = (extras.segments, n, t), (extras.key_segments, m, s)
        segments = [jax.lax.dynamic_slice_in_dim(ids, i * size, size, 1) for ids, i, size in of_both]
    if extras.mask is not None:
        mask = cut.of_pair(extras.mask, pair)
    seen = visible(form, queries, keys, segments, mask, extras.windows)
    if seen is not None:
        logits = jnp.where(seen, logits, UNSEEN)
    # Padded keys get -inf, not UNSEEN: they must not count even in the mean for a query that sees no key.
    if (length := cut.S // cut.key_chunks) % s:
        logits = jnp.where(m * s % (-(-length // s) * s) + jnp.arange(s) < length, logits, -jnp.inf)
    return logits, seen, slope


def _product(subscripts: str, x: jax.Array, y: jax.Array, form: Form) -> jax.Array:
    result: jax.Array = jnp.einsum(subscripts, x, y, precision=form.precision, preferred_element_type=jnp.float32)
    return result


def _zeros_or_none(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else jnp.zeros(x.shape, jnp.float32)
