"""Cross-entropy that stays where its logits are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxshard.core.constrain import constrain, splits


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The negative log-likelihood in nats, f32[...], of labels[...] under logits[..., V].

    Where the vocabulary V is split over a tensor axis the logits are not gathered: two all-reduces of one number per
    label (the maximum and the sum of exponentials) and one of the label's own logit, each over the axis (Shoeybi et al.
    2019, "Megatron-LM", section 3). Without a tensor axis there are no collectives. A label outside 0 to V - 1 has
    no logit: its loss is the log of the normaliser.
    """
    if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"cross_entropy: logits [..., V] need integer labels [...], got {logits.dtype}{list(logits.shape)} and "
            f"{labels.dtype}{list(labels.shape)}"
        )
    logits = logits.astype(jnp.float32)
    if splits("vocab", logits.shape[-1]):
        names = ("batch", *(None,) * (logits.ndim - 2), "vocab") if logits.ndim > 1 else ("vocab",)
        logits = constrain(logits, names)
    # Not an index: looking a label up would make the partitioner move the logits. Not in the labels' dtype: bytes wrap.
    own = (
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == jnp.asarray(labels, jnp.int32)[..., None]
    )
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(own, logits, 0).sum(-1)
