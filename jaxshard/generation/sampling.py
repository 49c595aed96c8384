"""Sample the next token from the logits of each row.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.keys import keys_of_rows


class Sampling(NamedTuple):
    """The options of sampling, applied in this order: temperature, top_k, top_p.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token (the first, if several are equally likely).
      top_k: sample from this many most likely tokens; None for all tokens.
      top_p: sample from the smallest set of tokens whose probabilities add up to at least this; None for all tokens.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1, for top_p.
    """

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None

    def check(self, *, has_key: bool) -> None:
        """Raise a ValueError for an option out of range, an option that temperature=0 ignores, or a missing key."""
        T, k, p = self
        if not (math.isfinite(T) and T >= 0):
            raise ValueError(f"generate: temperature must be at least 0, got {T}")
        if k is not None and (isinstance(k, bool) or k != int(k) or k < 1):
            raise ValueError(f"generate: top_k must be a whole number of at least 1, got {k}")
        if p is not None and not 0 < p <= 1:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, got {p}")
        if T == 0 and (k, p) != (None, None):
            raise ValueError(
                f"generate: temperature=0 takes the most likely token, so top_k={k} and top_p={p} have no effect; "
                "pass a temperature, such as temperature=1.0"
            )
        if T > 0 and not has_key:
            raise ValueError("generate: tokens are drawn at random, which needs a key: pass key=0, or temperature=0")

    def arrays(self, vocab: int) -> Sampling:
        """Convert the options to arrays, so that new values need no new compilation; all None if temperature is 0."""
        if self.temperature == 0:
            return Sampling(None, None, None)
        k = None if self.top_k is None else np.int32(min(self.top_k, vocab))
        return Sampling(np.float32(self.temperature), k, None if self.top_p is None else np.float32(self.top_p))


def draw(logits_BV: jax.Array, key: jax.Array, rows_B: jax.Array, at_B: jax.Array, how: Sampling) -> jax.Array:
    """Sample a token for each row, int32[B].

    A token's random key is made from its row's index and its position, so neither the mesh nor other rows change it.

    Args:
      logits_BV: the logits, f32, replicated along V.
      key: the random key of the generation.
      rows_B: the index of each row among all prompts.
      at_B: the position of the new token in each row.
      how: the options, from `Sampling.arrays`.
    """
    if how.temperature is None:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = keep_likely(logits_BV / how.temperature, how)
    keys_B = jax.vmap(jax.random.fold_in)(keys_of_rows(key, rows_B), at_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def keep_likely(logits_BV: jax.Array, how: Sampling) -> jax.Array:
    """Set the logits of tokens that top_k and top_p exclude to -inf; of equally likely tokens all are kept or none."""
    if how.top_k is None and how.top_p is None:
        return logits_BV
    # Find the smallest logit to keep, and compare all logits with it: no gather by sorted indices.
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if how.top_k is not None:
        least_B1 = jnp.take(sorted_BV, how.top_k - 1, axis=1)[:, None]
        logits_BV, sorted_BV = (jnp.where(x >= least_B1, x, -jnp.inf) for x in (logits_BV, sorted_BV))
    if how.top_p is not None:
        chances_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(chances_BV, axis=-1) - chances_BV  # the first token is always kept
        least_B1 = jnp.where(before_BV < how.top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return logits_BV
