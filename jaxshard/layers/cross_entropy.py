"""Cross-entropy that does not gather logits that are split over the vocabulary."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxshard.core.constrain import constrain, is_split


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Int[Array, "*batch"],
    *,
    where: Bool[Array, ...] | None = None,
    ignore_index: int | None = None,
) -> Float32[Array, "*batch"]:
    """Compute the negative log-likelihood of labels under logits, in nats and f32.

    If the vocabulary is split over a tensor axis, the logits are not gathered: over that axis there are three
    all-reduces of one number per label (the maximum, the sum of exponentials and the label's own logit). Otherwise no
    collectives.

    Args:
      logits: any floating dtype; the reduction is done in f32.
      labels: integers from 0 to vocab - 1. The loss of any other label that is not ignored is NaN, which `js.make_step`
        reports as a bad step.
      where: True for labels that count; it broadcasts to the shape of the labels. The loss and all gradients of the
        others are 0, whatever their labels and logits.
      ignore_index: a label that does not count, such as -100.

    Returns:
      The loss of each label. Divide their sum by the number of labels that count, not by `losses.size`.

    Raises:
      ValueError: labels that are not integers, or whose shape is not that of the logits without the last dimension; a
        `where` that is not boolean or does not broadcast to the labels.
      TypeError: an `ignore_index` that is no integer.

    References:
      Shoeybi et al. 2019, "Megatron-LM", section 3.

    Example:
        losses = js.cross_entropy(logits, batch["labels"], ignore_index=-100)     # f32[batch, seq]
        return js.Mean(losses.sum(), (batch["labels"] != -100).sum())
    """
    if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"cross_entropy: logits [..., V] need integer labels [...], got {logits.dtype}{list(logits.shape)} and "
            f"{labels.dtype}{list(labels.shape)}"
        )
    inside, counts = in_vocabulary(labels, logits.shape[-1]), _find_counted(labels, where, ignore_index)
    if counts is not None:
        # Before the loss is computed, not only after: 0 times the gradient of a NaN or infinite logit would be NaN.
        logits, labels = jnp.where(counts[..., None], logits, 0), jnp.where(counts, labels, 0)
    logits = logits.astype(jnp.float32)
    if is_split("vocab", logits.shape[-1]):
        rows = ("batch", "context", *(None for _ in labels.shape[2:]))[: labels.ndim]
        logits = constrain(logits, (*rows, "vocab"))
    nats = spoil(inside, compute_nats(logits, labels))
    return nats if counts is None else jnp.where(counts, nats, 0)


def compute_nats(logits: Float32[Array, "*batch vocab"], labels: Int[Array, "*batch"]) -> Float32[Array, "*batch"]:
    """Compute the cross-entropy of each label, in nats: logsumexp(logits) - the label's own logit.

    Labels must be from 0 to vocab - 1. Arguments are not checked, and no sharding constraint is added.
    """
    # Not an index: looking a label up would make the partitioner move the logits. Not in the labels' dtype: bytes wrap.
    own = (
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == jnp.asarray(labels, jnp.int32)[..., None]
    )
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(own, logits, 0).sum(-1)


def in_vocabulary(labels: Int[Array, "*batch"], vocab: int) -> Bool[Array, "*batch"]:
    """Return True for each label from 0 to vocab - 1, False for any other."""
    # One comparison: cast to unsigned, negative labels are larger than any vocabulary. A cast to fewer bits than they
    # have, or than 32, might wrap a label around into the vocabulary.
    return labels.astype(f"uint{max(32, 8 * labels.dtype.itemsize)}") < vocab


def spoil(good: Bool[Array, "*batch"], nats: Float32[Array, "*batch"]) -> Float32[Array, "*batch"]:
    """Return `nats` with NaN wherever `good` is False.

    Only values change. Gradients pass as if this function were not there, which costs nothing.
    """
    return nats + jnp.where(good, jnp.float32(0), jnp.float32(jnp.nan))


def _find_counted(labels: jax.Array, where: Any, ignore_index: Any) -> jax.Array | None:
    """Return a bool for each label, True if its loss counts; None if all labels count.

    Args:
      labels: the labels.
      where: True for labels that count, or None.
      ignore_index: a label that does not count, or None.

    Raises:
      ValueError: `where` is not boolean or does not broadcast to the labels.
      TypeError: `ignore_index` is no integer.
    """
    counts = None
    if where is not None:
        if jnp.result_type(where) != jnp.bool_:
            raise ValueError(
                f"cross_entropy: where must be boolean, True for labels that count, got {jnp.result_type(where)}; "
                "write where=mask != 0, and multiply the losses by weights"
            )
        try:
            counts = jnp.broadcast_to(where, labels.shape)
        except ValueError:
            raise ValueError(
                f"cross_entropy: where {list(jnp.shape(where))} does not broadcast to the labels {list(labels.shape)}"
            ) from None
    if ignore_index is None:
        return counts
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral):
        raise TypeError(f"cross_entropy: ignore_index must be an integer such as -100, got {ignore_index!r}")
    bounds, ignored = jnp.iinfo(labels.dtype), int(ignore_index)
    if not bounds.min <= ignored <= bounds.max:  # no label of this dtype
        return counts
    kept = labels != ignored
    return kept if counts is None else counts & kept
