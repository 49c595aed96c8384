"""GPT-2 of Flax modules as a `Stacked` model, and its ready-made sizes. `models/decoder.py` tells what a batch is.

Shape suffixes: B rows, T positions, N = B T, C width, F the MLP's width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxshard.core.constrain import constrain, splits
from jaxshard.core.keys import row_keys
from jaxshard.core.types import PyTree
from jaxshard.models.decoder import (
    HEADS,
    RESIDUAL,
    STDDEV,
    WHOLE,
    Decoder,
    Output,
    Recipe,
    Size,
    apply,
    check_sizes,
    enter,
    init_parts,
)
from jaxshard.models.decoder import logits as logits
from jaxshard.models.decoder import sample as sample


def gpt(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    seq: int,
    dropout: float = 0.0,
    tied: bool = True,
    expansion: int = 4,
) -> Decoder:
    """A decoder-only transformer, GPT-2's: `model.init(key)` and `model.loss(params, batch, key)`.

    Pre-LN blocks, learned positions, causal attention, GELU (tanh form), biases everywhere but in the output matrix,
    which is the token embedding itself when `tied`. Weights are drawn from N(0, 0.02), those that write into the
    residual stream with 0.02 / sqrt(2 depth). Everything is computed in the dtype of the parameters, layer-norm
    statistics, softmax and loss in f32.

    The loss is a `js.Mean` of nats per token; in evaluation (no key) there is an "accuracy" beside it. `dropout` drops
    the embeddings and both branches of a block, row by row from `js.row_keys`, so that every engine drops the same.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "seq": seq, "expansion": expansion}
    check_sizes("gpt", sizes)
    if width % heads:
        raise ValueError(f"gpt: width {width} is not divisible by heads {heads}; pass a multiple of {heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"gpt: dropout must be in [0, 1), got {dropout}")

    embedding = Embedding(vocab, seq, width)
    one_block = Block(heads, expansion, dropout, residual_stddev=STDDEV / (2 * depth) ** 0.5)
    output = _output(None if tied else vocab)

    def embed(params: PyTree, tokens_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        x_BTC = constrain(apply(embedding, params["embed"], tokens_BT), RESIDUAL, grad=WHOLE)
        return _drop(x_BTC, dropout, _row_keys(key, dropout, len(tokens_BT)), 0)

    def block(params: PyTree, x_BTC: jax.Array, key: jax.Array | None) -> jax.Array:
        return apply(one_block, params, x_BTC, _row_keys(key, dropout, len(x_BTC)))

    init = init_parts(embedding, one_block, output, width)
    return Decoder("gpt", seq, embed, block, readout, num_blocks=depth, init=init)


def _gpt2(width: int, depth: int, heads: int, learning_rate: float) -> Size:
    # Table 2 of Radford et al. 2019; rates of Brown et al. 2020, table 2.1, for the sizes nearest to these.
    shape = {"vocab": 50257, "width": width, "depth": depth, "heads": heads, "seq": 1024}
    return Size(shape, Recipe(batch=512, steps=100_000, learning_rate=learning_rate, warmup=2000), gpt)


SIZES = {
    # On the standard library: 1.93 nats per held-out byte (two seeds), in 50 CPU seconds on one device. The warm-up is
    # long because nothing clips the gradient: with 30 steps of it and 3e-3 the loss stays above 2.2.
    "gpt-1m": Size(
        {"vocab": 256, "width": 144, "depth": 4, "heads": 8, "seq": 32},
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=80),
        gpt,
    ),
    # Not tuned.
    "gpt-10m": Size(
        {"vocab": 256, "width": 384, "depth": 6, "heads": 8, "seq": 256},
        Recipe(batch=64, steps=2000, learning_rate=1e-3, warmup=100),
        gpt,
    ),
    "gpt2": _gpt2(768, 12, 12, 6e-4),
    "gpt2-medium": _gpt2(1024, 24, 16, 3e-4),
    "gpt2-large": _gpt2(1280, 36, 20, 2.5e-4),
    "gpt2-xl": _gpt2(1600, 48, 25, 2e-4),
}
"""Ready-made sizes; `gpt(**SIZES["gpt2"].shape | {"vocab": 256})` is one of them with another vocabulary."""


class Embedding(nn.Module):
    """x[B, T, C] of tokens[B, T]: token plus learned position embedding."""

    vocab: int
    seq: int
    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        init = nn.initializers.normal(STDDEV)
        tokens_BTC = nn.Embed(self.vocab, self.width, embedding_init=init, name="wte")(tokens_BT)
        tokens_BTC = constrain(tokens_BTC, WHOLE)
        positions_TC = self.param("wpe", init, (self.seq, self.width))
        return tokens_BTC + positions_TC[: tokens_BT.shape[1]]


class Block(nn.Module):
    """x[B, T, C] of x[B, T, C]: causal attention, then an MLP, each on a normalised copy and added."""

    heads: int
    expansion: int
    dropout: float
    residual_stddev: float

    @nn.compact
    def __call__(self, x_BTC: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        # Products see rows and positions as one dimension: where both are contracted at once, as in the gradient of
        # a kernel, XLA on CPU transposes both operands first, at several times the cost.
        B, T, C = x_BTC.shape
        init, residual_init = nn.initializers.normal(STDDEV), nn.initializers.normal(self.residual_stddev)

        def dense(name: str, x: jax.Array, features: int, init: Any) -> jax.Array:
            layer = nn.Dense(features, kernel_init=init, name=name)
            # Positions that are split can't be scattered once they are merged with rows.
            return layer(x) if splits("sequence") else layer(x.reshape(B * T, -1)).reshape(B, T, features)

        h_BTC = enter(nn.LayerNorm(epsilon=1e-5, name="ln_1")(x_BTC))
        h_BTC = _attend(dense("qkv", h_BTC, 3 * C, init), self.heads)
        h_BTC = constrain(dense("attn_out", h_BTC, C, residual_init), RESIDUAL)
        x_BTC = x_BTC + _drop(h_BTC, self.dropout, keys_B, 0)

        h_BTC = enter(nn.LayerNorm(epsilon=1e-5, name="ln_2")(x_BTC))
        h_BTF = constrain(nn.gelu(dense("mlp_in", h_BTC, self.expansion * C, init)), ("batch", None, "mlp"))
        h_BTC = constrain(dense("mlp_out", h_BTF, C, residual_init), RESIDUAL)
        return x_BTC + _drop(h_BTC, self.dropout, keys_B, 1)


def _output(vocab: int | None) -> Output:
    return Output(vocab, partial(nn.LayerNorm, epsilon=1e-5, name="ln_f"))


def readout(params: PyTree, x_BTC: jax.Array) -> jax.Array:
    """logits[B, T, V] of the last block's output, tied or not as the parameters tell."""
    head = params["head"]
    if "lm_head" in head:
        return apply(_output(head["lm_head"]["kernel"].shape[-1]), head, x_BTC)
    return apply(_output(None), head, x_BTC) @ params["embed"]["wte"]["embedding"].T


def _attend(qkv_BTX: jax.Array, heads: int) -> jax.Array:
    """Causal attention, x[B, T, C] of the projection [B, T, 3 C].

    The 3 C columns are ordered head by head, (q, k, v) within each, so that splitting them over a tensor axis splits
    whole heads (Megatron-LM, GPT-NeoX); GPT-2's published weights are ordered (q, k, v) first.
    """
    B, T, X = qkv_BTX.shape
    qkv_BTHX = constrain(qkv_BTX.reshape(B, T, heads, 3, X // (3 * heads)), (*HEADS, None))
    q_BTHD, k_BTHD, v_BTHD = (constrain(qkv_BTHX[:, :, :, i], HEADS) for i in range(3))
    x_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=True)
    return constrain(x_BTHD, HEADS).reshape(B, T, X // 3)


def _row_keys(key: jax.Array | None, dropout: float, rows: int) -> jax.Array | None:
    return None if key is None or dropout == 0 else row_keys(key, rows)


def _drop(x_BTC: jax.Array, rate: float, keys_B: jax.Array | None, call: int) -> jax.Array:
    """x with the share `rate` of its entries zero and the others scaled up; `call` tells the uses of one key apart."""
    if keys_B is None:
        return x_BTC

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, call), 1 - rate, x_BTC.shape[1:])

    return jnp.where(jax.vmap(keep)(keys_B), x_BTC / (1 - rate), 0).astype(x_BTC.dtype)
