"""Compute attention by its formula, and define the mask and logits that all kernels share.

    out = softmax(cap(q k^T / sqrt(D)) + bias) v          over the keys that a query sees; softmax in f32

Shape suffixes: B rows, T queries, S keys, H heads of queries, K heads of keys and values, G = H / K heads of queries
that share a head of keys and values, D size of a head, E size of a head of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The logit of a key that is not seen. Finite, so that a query that sees no key takes the mean of all values."""


class Form(NamedTuple):
    """The static arguments of a call of attention.

    Attributes:
      causal: query t sees only keys 0 to t.
      window: query t sees keys less than this many positions from t; None for no limit.
      soft_cap: logits x become soft_cap * tanh(x / soft_cap); None for no cap.
      dropout: the fraction of attention weights that are dropped; 0 without `Extras.keep`.
      precision: the precision of the matrix products, as in `jax.lax.dot_general`.
    """

    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    precision: Any = None

    def sees(self, first: Any, last: Any, first_key: Any, last_key: Any) -> Any:
        """Return True if some query in a range of positions may see some key in another range, by causality and window.

        Blocks for which it returns False can be skipped. If the positions are arrays, for many ranges, the result is an
        array too.

        Args:
          first, last: the first and last position of the queries.
          first_key, last_key: the first and last position of the keys.
        """
        near = True if self.window is None else (first - last_key < self.window) & (first_key - last < self.window)
        return near & (last >= first_key) if self.causal else near


class Extras(NamedTuple):
    """The optional arrays of a call of attention, in addition to q, k and v.

    Attributes:
      segments: int[B, T]; queries see keys with the same segment id.
      bias: float[1 or B, 1 or H, 1 or T, 1 or S], added to the logits.
      mask: bool[1 or B, 1 or H, 1 or T, 1 or S]; False hides a key.
      keep: bool[T, S], the attention weights that dropout keeps, the same in all rows and heads.
      key_segments: int[B, S], the segments of the keys, if they differ from `segments`.
      windows: int[B], a traced window for each row, instead of `Form.window`; only for causal attention.
    """

    segments: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    keep: jax.Array | None = None
    key_segments: jax.Array | None = None
    windows: jax.Array | None = None

    def of_keys(self) -> jax.Array | None:
        """Return the segment ids of the keys, int[B, S]; None without segments."""
        return self.segments if self.key_segments is None else self.key_segments


def formula(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form) -> jax.Array:
    """Compute attention with an array of all logits [B, H, T, S], which suits short sequences."""
    B, T, H, D = q_BTHD.shape
    S, K = k_BSKD.shape[1:3]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    logits_BKGTS = jnp.einsum(
        "btkgd,bskd->bkgts", q_BTKGD, k_BSKD, precision=form.precision, preferred_element_type=jnp.float32
    )
    logits_BKGTS, _ = cap(logits_BKGTS / D**0.5, form)
    if extras.bias is not None:
        logits_BKGTS = add_bias(logits_BKGTS, by_group(extras.bias, K))
    keys = extras.of_keys()
    segments = None if extras.segments is None or keys is None else (extras.segments, keys)
    mask = None if extras.mask is None else by_group(extras.mask, K)
    seen = visible(form, jnp.arange(T), jnp.arange(S), segments, mask, extras.windows)
    if seen is not None:
        logits_BKGTS = jnp.where(seen, logits_BKGTS, UNSEEN)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1)
    if extras.keep is not None:
        weights_BKGTS = drop(weights_BKGTS, extras.keep, form)
    out = jnp.einsum("bkgts,bske->btkge", weights_BKGTS.astype(v_BSKE.dtype), v_BSKE, precision=form.precision)
    return out.reshape(B, T, H, v_BSKE.shape[-1])


def cap(logits: jax.Array, form: Form) -> tuple[jax.Array, jax.Array | None]:
    """Apply the soft cap to logits; return (capped logits, the cap's derivative at the logits).

    Without a cap: the logits unchanged, and None.
    """
    if form.soft_cap is None:
        return logits, None
    bent = jnp.tanh(logits / form.soft_cap)
    return form.soft_cap * bent, 1 - bent * bent


def add_bias(logits: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias to logits; sums below `UNSEEN`, such as with a bias of -inf, become `UNSEEN`."""
    return jnp.maximum(logits + bias.astype(jnp.float32), UNSEEN)


def drop(weights: jax.Array, keep: jax.Array, form: Form) -> jax.Array:
    """Apply dropout to attention weights or their gradient: 0 where `keep` is False, else x / (1 - rate)."""
    return jnp.where(keep, weights / (1 - form.dropout), 0)


def by_group(x: jax.Array, kv_heads: int) -> jax.Array:
    """Reshape a bias or mask [B or 1, H or 1, T or 1, S or 1] so that it broadcasts to logits [B, K, G, T, S].

    K = `kv_heads`, and G = H / K query heads share a head of keys and values.
    """
    B, H, T, S = x.shape
    return x.reshape(B, 1, 1, T, S) if H == 1 else x.reshape(B, kv_heads, H // kv_heads, T, S)


def visible(
    form: Form,
    queries_T: jax.Array,
    keys_S: jax.Array,
    segments: Sequence[jax.Array] | None,
    mask: jax.Array | None,
    windows: jax.Array | None = None,
) -> jax.Array | None:
    """Return which keys each query sees, as a bool that broadcasts to [B, K, G, T, S]; None if all keys are seen.

    Args:
      form: the call's static arguments; causality and the window are read.
      queries_T: the positions of the queries in the sequence.
      keys_S: the positions of the keys in the sequence.
      segments: (int[B, T] of the queries, int[B, S] of the keys).
      mask: a bool that broadcasts to [B, K, G, T, S].
      windows: int[B], the window of each row, if it is traced.
    """
    seen = []
    distance_TS = queries_T[:, None] - keys_S[None, :]
    if form.causal:
        seen.append(distance_TS >= 0)
    if form.window is not None:
        seen.append(distance_TS < form.window)
        if not form.causal:
            seen.append(distance_TS > -form.window)
    if windows is not None:
        seen.append(distance_TS < windows[:, None, None, None, None])
    if segments is not None:
        of_queries_BT, of_keys_BS = segments
        seen.append((of_queries_BT[:, :, None] == of_keys_BS[:, None, :])[:, None, None])
    if mask is not None:
        seen.append(mask)
    if not seen:
        return None
    together = seen[0]
    for one in seen[1:]:
        together = together & one
    return together
