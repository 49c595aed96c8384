"""Choose the experts of each token, compute their weights, and count the tokens of each expert.

Shape suffixes: `...` any batch dimensions, T positions, E experts, k experts of each token.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The statistics of a call of `js.moe`, for losses and metrics: sums over the T tokens of each row of the batch.

    Under `js.explicit` the rows are the device's own. If `js.context` splits positions there, the sums are over the
    device's own positions, and a loss that is not linear in these sums needs a `jax.lax.psum` of them over the context
    axes first.

    Attributes:
      load: int32[*batch, E], the number of tokens that chose each expert. The sum over E is k * T.
      dropped: int32[*batch], the number of dropped choices; zeros without `capacity`.
      probabilities: f32[*batch, E], each expert's scores, which are normalised to a sum of 1 over the experts, summed
        over the tokens. Differentiable.
      z: f32[*batch], the squared logsumexp of a token's logits, summed over the tokens (Zoph et al. 2022, "ST-MoE",
        equation 5). Differentiable.
    """

    load: Int[Array, "*batch experts"]
    dropped: Int[Array, "*batch"]
    probabilities: Float[Array, "*batch experts"]
    z: Float[Array, "*batch"]


class Choice(NamedTuple):
    """The k experts of every token, and their weights in the token's output.

    Attributes:
      experts: int32[..., T, k], indices of experts. The index E, after the last expert, stands for a dropped choice:
        the expert had no room for the token.
      weights: f32[..., T, k].
    """

    experts: jax.Array
    weights: jax.Array


def route(
    logits: jax.Array, k: int, scores: Scores, normalize: bool, scale: float, bias: jax.Array | None, room: int | None
) -> tuple[Choice, Routing]:
    """Choose for each token the k experts with the largest scores.

    Args:
      logits: the router's logits, [..., T, E].
      k: the number of experts of a token.
      scores: the function from logits to scores: "softmax" or "sigmoid".
      normalize: True to divide the weights of a token (the scores of its experts) by their sum.
      scale: a factor by which the weights are multiplied.
      bias: [E], added to the scores to choose the experts, but not to the weights.
      room: the largest number of tokens of a row that an expert accepts; None for no limit.

    Returns:
      (the experts of each token and their weights, statistics of each row).
    """
    logits = logits.astype(jnp.float32)
    score = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(score if bias is None else score + bias.astype(jnp.float32))
    experts = _largest(ranked, k)
    weights = jnp.take_along_axis(score, experts, -1)
    if normalize:
        weights = _over_sum(weights)
    # A NaN logit must reach the loss, even if it belongs to none of the chosen experts.
    weights = jnp.where(jnp.isnan(logits).any(-1, keepdims=True), jnp.nan, weights * scale)
    E = logits.shape[-1]
    load = _count(experts, E)
    dropped = jnp.zeros(load.shape[:-1], jnp.int32)
    if room is not None:
        lost = _without_room(experts, E, room)
        dropped = lost.sum((-2, -1), dtype=jnp.int32)
        experts = jnp.where(lost, E, experts)
    over_experts = score if scores == "softmax" else _over_sum(score)
    z = jnp.square(jax.nn.logsumexp(logits, -1)).sum(-1)
    return Choice(experts, weights), Routing(load, dropped, over_experts.sum(-2), z)


def room_of(capacity: float, tokens: int, k: int, experts: int) -> int:
    """Return how many tokens of a row each expert accepts: `capacity` times a balanced load, rounded up.

    A row is one sequence of the batch; `tokens` is its length, and `k` the number of experts of a token.
    """
    return math.ceil(capacity * tokens * k / experts)


def _largest(ranked: jax.Array, k: int) -> jax.Array:
    """Return the indices of each token's k largest scores, int32[..., T, k], in descending order, all different.

    The scores are found by k argmaxes, because for `jax.lax.top_k` the compiler would all-gather rows that are split
    (CPU, JAX 0.12).
    """
    ranked = jnp.maximum(ranked, jnp.finfo(ranked.dtype).min)  # scores of -inf stay above those already chosen
    chosen = []
    for _ in range(k):
        chosen.append(jnp.argmax(ranked, -1).astype(jnp.int32))
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) == chosen[-1][..., None], -jnp.inf, ranked)
    return jnp.stack(chosen, -1)


def _over_sum(x: jax.Array) -> jax.Array:
    # All scores of a token may be zero (sigmoids of very negative logits): avoid 0 / 0.
    return x / jnp.maximum(x.sum(-1, keepdims=True), jnp.finfo(x.dtype).tiny)


def _count(experts: jax.Array, E: int) -> jax.Array:
    """Count how many tokens of a row chose each expert: int32[..., T, k] -> int32[..., E]."""
    flat = experts.reshape(*experts.shape[:-2], -1)
    return jax.nn.one_hot(flat, E, dtype=jnp.int32).sum(-2)


def _without_room(experts: jax.Array, E: int, room: int) -> jax.Array:
    """Return True for each choice of an expert that has no room for the token, bool[..., T, k].

    An expert accepts `room` tokens of a row. Tokens' first choices have priority, then earlier positions.
    """
    *_, T, k = experts.shape
    by_priority = experts.swapaxes(-1, -2).reshape(*experts.shape[:-2], k * T)
    one_hot = jax.nn.one_hot(by_priority, E, dtype=jnp.int32)
    # The place of each choice in the queue of its expert, from 1 on.
    place = jnp.take_along_axis(jnp.cumsum(one_hot, -2), by_priority[..., None], -1)[..., 0]
    return (place > room).reshape(*experts.shape[:-2], k, T).swapaxes(-1, -2)
