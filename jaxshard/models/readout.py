"""Compute the logits of a decoder in two steps: embed the tokens, then run the blocks on the embeddings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import PyTree
from jaxshard.models.decoder import Decoder


def embed_tokens(model: Decoder, params: PyTree, tokens: Int[Array, "batch seq"]) -> PyTree:
    """Embed rows of tokens: return the input of the first block, [batch, seq, width].

    Args:
      model: a model of `js.models`, such as `js.models.gpt(...)`.
      params: the model's parameters in model order, such as `js.logical(run, layout).params`.
      tokens: rows of at most `model.seq` tokens.

    Example:
        x = js.models.embed_tokens(model, params, tokens)      # f32[batch, seq, width]
        logits = js.models.logits_of_embedded(model, params, x)
    """
    rest = {name: part for name, part in params.items() if name != BLOCKS}
    # embed takes a training row, whose last token is only a target.
    return model.embed(rest, {"tokens": jnp.pad(tokens, ((0, 0), (0, 1)))}, None)


def logits_of_embedded(model: Decoder, params: PyTree, x: PyTree) -> Float[Array, "batch seq vocab"]:
    """Compute the logits, in f32, from the result of `embed_tokens`; equal to `logits(model, params, tokens)`.

    Use it for gradients with respect to embeddings, as in `js.attribution` of tokens.

    Args:
      model: a model of `js.models`, such as `js.models.gpt(...)`.
      params: the model's parameters in model order, such as `js.logical(run, layout).params`.
      x: the result of `embed_tokens`, [batch, seq, width].

    Example:
        x = js.models.embed_tokens(model, params, tokens)
        logits = js.models.logits_of_embedded(model, params, x)     # f32[batch, seq, vocab]
    """

    def head(rest: PyTree, x: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        return model.readout(rest, x)

    inner = Stacked(lambda _, x, key: x, model.block, head, model.num_blocks, model.init_parts)
    inner.remat = model.remat
    logits: Any = inner.compute_loss(params, x, None)
    return jnp.asarray(logits, jnp.float32)
