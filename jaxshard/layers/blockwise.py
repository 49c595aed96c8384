"""Attention block by block with an online softmax: exact, and linear in the sequence, forward and backward.

Queries and keys are cut into blocks, and one scan goes over the pairs of blocks that may see each other:

    4 blocks, causal    keys 0 1 2 3       pairs (0,0) (1,0) (1,1) (2,0) (2,1) (2,2) (3,0) (3,1) (3,2) (3,3)
             queries 0       x
                     1       x x           carried for each query: the largest logit so far, the sum of
                     2       x x x         exp(logit - largest), and the sum of exp(logit - largest) * value
                     3       x x x x

The backward pass computes the logits of every pair again from q and k. Nothing larger than one pair's logits exists,
[B, H, block, block]. Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao et al. 2022,
"FlashAttention", appendix B.

Shape suffixes as in `formula`. N and M count the blocks of queries and keys, t and s the positions in a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxshard.layers.formula import UNSEEN, Extras, Form, add_bias, by_group, cap, drop, visible

NAME = "attention_out"
"""The name for `jax.checkpoint_policies` of what the backward pass needs beside q, k and v, the output among it."""

_MOST_LOGITS = 2**24
"""Of one pair of blocks, over all rows and heads: 64 MB."""

Pair = tuple[jax.Array, jax.Array]


def blockwise(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form, *, block: int = 512
) -> jax.Array:
    """Compute attention in blocks of at most `block` positions. It has no forward-mode derivative (`jax.jvp`)."""
    B, T, H, D = q_BTHD.shape
    S, K, E = v_BSKE.shape[1:]
    while block > 128 and B * H * block**2 > _MOST_LOGITS:
        block //= 2
    cut = Cut(T, S, _block_size(T, block), _block_size(S, block))
    q_NBKGtD = cut.split(q_BTHD.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4), 0)
    k_MBKsD, v_MBKsE = (cut.split(x.swapaxes(1, 2), 1) for x in (k_BSKD, v_BSKE))
    by_groups = Extras(
        segments=None if extras.segments is None else cut.pad(extras.segments, 1, 0),
        bias=None if extras.bias is None else cut.pad_pairs(by_group(extras.bias, K)),
        mask=None if extras.mask is None else cut.pad_pairs(by_group(extras.mask, K)),
        keep=None if extras.keep is None else cut.pad_pairs(extras.keep),
    )
    out_NBKGtE = _attend(cut, form, q_NBKGtD, k_MBKsD, v_MBKsE, by_groups)
    out_BKGTE = jnp.moveaxis(out_NBKGtE, 0, 3).reshape(B, K, H // K, -1, E)[..., :T, :]
    return out_BKGTE.transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def _block_size(length: int, largest: int) -> int:
    """Return the size of equal blocks, as few as possible, in a multiple of 16."""
    blocks = -(-length // largest)
    return -(-length // (16 * blocks)) * 16


class Cut(NamedTuple):
    """T queries in blocks of t, and S keys in blocks of s; the last ones are padded. Side 0 is queries, side 1 keys."""

    T: int
    S: int
    t: int
    s: int

    def pad(self, x: jax.Array, dim: int, side: int) -> jax.Array:
        """Pad a dimension to whole blocks, with zeros."""
        return jnp.pad(x, [(0, -x.shape[dim] % self[2 + side] if d == dim else 0) for d in range(x.ndim)])

    def split(self, x: jax.Array, side: int) -> jax.Array:
        """Cut [..., length, D] into [blocks, ..., block, D]."""
        x, size = self.pad(x, x.ndim - 2, side), self[2 + side]
        return jnp.moveaxis(x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1]), -3, 0)

    def pad_pairs(self, x: jax.Array) -> jax.Array:
        """Pad [..., T or 1, S or 1] to whole blocks; what has one element stays."""
        for side, dim in enumerate((x.ndim - 2, x.ndim - 1)):
            if x.shape[dim] > 1:
                x = self.pad(x, dim, side)
        return x

    def of_pair(self, x: jax.Array, pair: Pair) -> jax.Array:
        """Take one pair's part out of a padded [..., T or 1, S or 1]."""
        for side, dim in enumerate((x.ndim - 2, x.ndim - 1)):
            if x.shape[dim] > 1:
                x = jax.lax.dynamic_slice_in_dim(x, pair[side] * self[2 + side], self[2 + side], dim)
        return x

    def add_to_pair(self, sum: jax.Array, x: jax.Array, pair: Pair) -> jax.Array:
        """Add one pair's part to a padded sum [..., T or 1, S or 1]; summed where the sum has one element."""
        dims = tuple(dim for dim, size in enumerate(sum.shape) if size == 1)
        x = x.sum(dims, keepdims=True)
        starts = [0] * (x.ndim - 2) + [i * size if n > 1 else 0 for i, size, n in zip(pair, self[2:], sum.shape[-2:])]
        part = jax.lax.dynamic_slice(sum, starts, x.shape)
        return jax.lax.dynamic_update_slice(sum, part + x, starts)

    def pairs(self, form: Form, extras: Extras) -> jax.Array:
        """List the pairs to compute, int32[pairs, 2]."""
        # A query that a mask keeps from every key takes the mean of all values, so then no pair may be left out.
        every = extras.mask is not None
        first, first_key = np.arange(0, self.T, self.t), np.arange(0, self.S, self.s)
        seen = form.sees(first[:, None], first[:, None] + self.t - 1, first_key, first_key + self.s - 1)
        found = np.argwhere(np.broadcast_to(seen | every, (first.size, first_key.size)))
        return jnp.asarray(found, jnp.int32)


# A policy of `jax.checkpoint` looks into loops: "dots" would save the logits of every pair. It does not look into a
# call with a derivative of its own, so the forward pass is one. The derivative serves second derivatives only.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _closed_forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _forward(cut, form, q, k, v, extras)


def _open_forward(cut: Cut, form: Form, *args: Any) -> tuple[Any, Any]:
    return jax.vjp(partial(_forward, cut, form), *args)


def _pull_back(cut: Cut, form: Form, pullback: Any, cotangents: Any) -> Any:
    return pullback(cotangents)


_closed_forward.defvjp(_open_forward, _pull_back)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> jax.Array:
    return _forward(cut, form, q, k, v, extras)[0]


def _attend_forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[jax.Array, Any]:
    out, largest, total = (checkpoint_name(x, NAME) for x in _closed_forward(cut, form, q, k, v, extras))
    return out, (q, k, v, extras, out, largest, total)


def _forward(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (out[N, B, K, G, t, E], largest logit[N, B, K, G, t], sum of exp(logit - largest) of that shape)."""
    per_query = q.shape[:-1]

    def add_pair(carry: tuple[jax.Array, ...], pair: Pair) -> tuple[jax.Array, ...]:
        n, m = pair
        largest, total, out = (x[n] for x in carry)
        logits, _, _ = _logits(cut, form, q, k, extras, pair)
        new = jnp.maximum(largest, logits.max(-1))
        weights, shrink = jnp.exp(logits - new[..., None]), jnp.exp(largest - new)
        total = total * shrink + weights.sum(-1)
        if extras.keep is not None:
            weights = drop(weights, cut.of_pair(extras.keep, pair), form)
        out = out * shrink[..., None] + _product("bkgts,bkse->bkgte", weights.astype(v.dtype), v[m], form)
        return tuple(x.at[n].set(mine) for x, mine in zip(carry, (new, total, out)))

    zeros = partial(jnp.zeros, dtype=jnp.float32)
    start = zeros(per_query) + UNSEEN, zeros(per_query), zeros((*per_query, v.shape[-1]))
    largest, total, out = _over_pairs(cut, form, extras, add_pair, start)
    return (out / total[..., None]).astype(v.dtype), largest, total


def _attend_backward(
    cut: Cut, form: Form, kept: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Extras]:
    q, k, v, extras, out, largest, total = kept
    dot = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)

    def add_pair(carry: tuple[Any, ...], pair: Pair) -> tuple[Any, ...]:
        n, m = pair
        dq, dk, dv, d_bias = carry
        logits, seen, slope = _logits(cut, form, q, k, extras, pair)
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
    dq, dk, dv, d_bias = _over_pairs(cut, form, extras, add_pair, start)
    d_extras = Extras(bias=None if d_bias is None else d_bias.astype(extras.bias.dtype))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_extras


_attend.defvjp(_attend_forward, _attend_backward)


def _over_pairs(cut: Cut, form: Form, extras: Extras, body: Any, start: Any) -> Any:
    carry, _ = jax.lax.scan(lambda carry, pair: (body(carry, (pair[0], pair[1])), None), start, cut.pairs(form, extras))
    return carry


def _logits(
    cut: Cut, form: Form, q: jax.Array, k: jax.Array, extras: Extras, pair: Pair
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (logits[B, K, G, t, s], which of them are seen, derivative of the cap) of one pair."""
    (n, m), (t, s) = pair, (cut.t, cut.s)
    logits, slope = cap(_product("bkgtd,bksd->bkgts", q[n], k[m], form) / q.shape[-1] ** 0.5, form)
    if extras.bias is not None:
        logits = add_bias(logits, cut.of_pair(extras.bias, pair))
    queries, keys = n * t + jnp.arange(t), m * s + jnp.arange(s)
    segments = mask = None
    if (ids := extras.segments) is not None:
        segments = [jax.lax.dynamic_slice_in_dim(ids, i * size, size, 1) for i, size in ((n, t), (m, s))]
    if extras.mask is not None:
        mask = cut.of_pair(extras.mask, pair)
    seen = visible(form, queries, keys, segments, mask)
    if seen is not None:
        logits = jnp.where(seen, logits, UNSEEN)
    if cut.S % s:  # padding does not even count where a query sees nothing
        logits = jnp.where(keys < cut.S, logits, -jnp.inf)
    return logits, seen, slope


def _product(subscripts: str, x: jax.Array, y: jax.Array, form: Form) -> jax.Array:
    result: jax.Array = jnp.einsum(subscripts, x, y, precision=form.precision, preferred_element_type=jnp.float32)
    return result


def _zeros_or_none(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else jnp.zeros(x.shape, jnp.float32)
