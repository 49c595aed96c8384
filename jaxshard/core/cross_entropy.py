"""Cross-entropy that leaves logits split over the vocabulary where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxshard.core.constrain import constrain, is_split


def cross_entropy(logits: Float[Array, "*batch vocab"], labels: Int[Array, "*batch"]) -> Float32[Array, "*batch"]:
    """Compute the negative log-likelihood of labels under logits, in nats and f32.

    If the vocabulary is split over a tensor axis, the logits are not gathered: over that axis there are three
    all-reduces of one number per label (the maximum, the sum of exponentials and the label's own logit). Otherwise no
    collectives.

    Args:
      logits: any floating dtype; the reduction is done in f32.
      labels: integers. One outside of 0 to vocab - 1 has no logit: its loss is the log of the normaliser, so mask it.

    Returns:
      The loss of each label.

    Raises:
      ValueError: labels that are not integers or do not have the shape of the logits but for the last dimension.

    References:
      Shoeybi et al. 2019, "Megatron-LM", section 3.

    Example:
        losses = js.cross_entropy(logits, batch["labels"])            # f32[batch, seq]
        return js.Mean(losses.sum(), losses.size)
    """
    if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"cross_entropy: logits [..., V] need integer labels [...], got {logits.dtype}{list(logits.shape)} and "
            f"{labels.dtype}{list(labels.shape)}"
        )
    logits = logits.astype(jnp.float32)
    if is_split("vocab", logits.shape[-1]):
        rows = ("batch", "context", *(None for _ in labels.shape[2:]))[: labels.ndim]
        logits = constrain(logits, (*rows, "vocab"))
    return compute_nats(logits, labels)


def compute_nats(logits: Float32[Array, "*batch vocab"], labels: Int[Array, "*batch"]) -> Float32[Array, "*batch"]:
    """Compute what `cross_entropy` does, of logits that are where they should be."""
    # Not an index: looking a label up would make the partitioner move the logits. Not in the labels' dtype: bytes wrap.
    own = (
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == jnp.asarray(labels, jnp.int32)[..., None]
    )
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(own, logits, 0).sum(-1)
