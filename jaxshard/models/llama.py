"""Llama 3 of Flax modules as a `Stacked` model, and its ready-made sizes. `models/decoder.py` tells what a batch is.

Shape suffixes: B rows, T positions, C width, F the MLP's hidden width, H heads, K heads of keys and values, D = C / H,
V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxshard.core.constrain import constrain, splits
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

_KV_HEADS = ("batch", None, "kv_heads", None)


def llama(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    seq: int,
    rope_base: float = 500_000,
    tied: bool = False,
) -> Decoder:
    """A decoder-only transformer, Llama 3's: `model.init(key)` and `model.loss(params, batch, key)`.

    Blocks with RMS norms in front, rotary positions, causal attention in which heads / kv_heads neighbouring heads
    share keys and values, a gated SiLU, and no biases. The output matrix is the token embedding where `tied`. Rotary
    positions turn dimension i of a head together with i + D / 2, by the angle t rope_base^(-2 i / D) at position t.
    Weights are drawn from N(0, 0.02), those that write into the residual stream with 0.02 / sqrt(2 depth). Everything
    is computed in the dtype of the parameters, statistics of norms, angles, softmax and loss in f32.

    A tensor axis that does not divide `kv_heads` leaves keys and values, and their weights, whole.

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.2; Su et al. 2021, "RoFormer".
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    check_sizes("llama", sizes | {"seq": seq})
    if width % heads or width // heads % 2:
        raise ValueError(
            f"llama: width {width} over heads {heads} must give heads of an even size; pass a multiple of {2 * heads}"
        )
    if heads % kv_heads:
        raise ValueError(f"llama: heads {heads} is not divisible by kv_heads {kv_heads}; pass a divisor of {heads}")
    if rope_base <= 1:
        raise ValueError(f"llama: rope_base must be above 1, got {rope_base}")

    embedding = Embedding(vocab, width)
    one_block = Block(heads, kv_heads, hidden, rope_base, residual_stddev=STDDEV / (2 * depth) ** 0.5)
    output = Output(None if tied else vocab, partial(nn.RMSNorm, epsilon=1e-5, name="norm"))

    def embed(params: PyTree, tokens_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        return constrain(apply(embedding, params["embed"], tokens_BT), RESIDUAL, grad=WHOLE)

    def block(params: PyTree, x_BTC: jax.Array, key: jax.Array | None) -> jax.Array:
        return apply(one_block, params, x_BTC)

    def readout(params: PyTree, x_BTC: jax.Array) -> jax.Array:
        x_BTX = apply(output, params["head"], x_BTC)
        return x_BTX @ params["embed"]["embed_tokens"]["embedding"].T if tied else x_BTX

    init = init_parts(embedding, one_block, output, width)
    return Decoder("llama", seq, embed, block, readout, num_blocks=depth, init=init)


SIZES = {
    # Not tuned: gpt-1m's recipe. On the standard library 1.67 nats per held-out byte (one seed), in 67 CPU seconds.
    "llama-1m": Size(
        {"vocab": 256, "width": 144, "depth": 4, "heads": 8, "kv_heads": 4, "hidden": 384, "seq": 32},
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=80),
        llama,
    ),
    # Table 3 of Grattafiori et al. 2024; batch, warm-up and steps of its section 3.4.1, which are the 405B's.
    "llama3-8b": Size(
        {
            "vocab": 128_256, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336, "seq": 8192,
            "rope_base": 500_000,
        },
        Recipe(batch=512, steps=1_200_000, learning_rate=3e-4, warmup=8000),
        llama,
    ),
}  # fmt: skip
"""Ready-made sizes; `llama(**SIZES["llama3-8b"].shape | {"seq": 2048})` is one of them with shorter rows."""


class Embedding(nn.Module):
    """x[B, T, C] of tokens[B, T]."""

    vocab: int
    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        init = nn.initializers.normal(STDDEV)
        tokens_BTC = nn.Embed(self.vocab, self.width, embedding_init=init, name="embed_tokens")(tokens_BT)
        return constrain(tokens_BTC, WHOLE)


class Block(nn.Module):
    """x[B, T, C] of x[B, T, C]: grouped-query attention, then a gated MLP, each on a normalised copy and added."""

    heads: int
    kv_heads: int
    hidden: int
    rope_base: float
    residual_stddev: float

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        # As in the GPT: products see rows and positions as one dimension, unless positions are split.
        B, T, C = x_BTC.shape
        D = C // self.heads
        init, residual_init = nn.initializers.normal(STDDEV), nn.initializers.normal(self.residual_stddev)

        def dense(name: str, x: jax.Array, features: tuple[int, ...], init: nn.initializers.Initializer) -> jax.Array:
            inputs = x.shape[2:]
            axis = tuple(range(-len(inputs), 0))
            layer = nn.DenseGeneral(features, axis=axis, use_bias=False, kernel_init=init, name=name)
            return layer(x) if splits("sequence") else layer(x.reshape(B * T, *inputs)).reshape(B, T, *features)

        h_BTC = enter(nn.RMSNorm(epsilon=1e-5, name="attn_norm")(x_BTC))
        q_BTHD = constrain(dense("q_proj", h_BTC, (self.heads, D), init), HEADS)
        k_BTKD = constrain(dense("k_proj", h_BTC, (self.kv_heads, D), init), _KV_HEADS)
        v_BTKD = constrain(dense("v_proj", h_BTC, (self.kv_heads, D), init), _KV_HEADS)
        q_BTHD, k_BTKD = rotated(q_BTHD, self.rope_base), rotated(k_BTKD, self.rope_base)
        h_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, is_causal=True)
        h_BTC = dense("o_proj", constrain(h_BTHD, HEADS), (C,), residual_init)
        x_BTC = x_BTC + constrain(h_BTC, RESIDUAL)

        h_BTC = enter(nn.RMSNorm(epsilon=1e-5, name="mlp_norm")(x_BTC))
        gate_BTF = constrain(dense("gate_proj", h_BTC, (self.hidden,), init), ("batch", None, "mlp"))
        up_BTF = constrain(dense("up_proj", h_BTC, (self.hidden,), init), ("batch", None, "mlp"))
        h_BTC = dense("down_proj", nn.silu(gate_BTF) * up_BTF, (C,), residual_init)
        return x_BTC + constrain(h_BTC, RESIDUAL)


def rotated(x_BTHD: jax.Array, base: float) -> jax.Array:
    """x[B, T, heads, D] with the dimensions i and i + D / 2 of position t turned by the angle t base^(-2 i / D)."""
    T, D = x_BTHD.shape[1], x_BTHD.shape[3]
    rates = jnp.asarray(base ** (-np.arange(0, D, 2) / D), jnp.float32)
    angles_T1D = jnp.arange(T, dtype=jnp.float32)[:, None, None] * rates
    cos, sin = jnp.cos(angles_T1D), jnp.sin(angles_T1D)
    first, second = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHD.dtype)
