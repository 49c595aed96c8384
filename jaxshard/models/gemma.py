"""Gemma 2 and 3 (text) as `js.Stacked` models of Flax modules. `models/decoder.py` describes the batch.

Shape suffixes: B rows, T positions, C width, F the MLP's hidden width, H heads, K heads of keys and values, D the
width of a head, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxshard.core.constrain import constrain
from jaxshard.core.types import PyTree
from jaxshard.layers.attention.attention import attention
from jaxshard.models.decoder import Decoder, Rows, remember_arguments
from jaxshard.models.llama import KV_HEADS, Embedding, dense, gated_mlp, turn
from jaxshard.models.parts import (
    HEADS,
    RESIDUAL,
    STDDEV,
    WHOLE_ROWS,
    Output,
    Window,
    apply,
    check_sizes,
    check_window,
    enter_tensor_region,
    init_parts,
    residual_stddev,
    window_of,
)
from jaxshard.models.quantize import Quant, quantize
from jaxshard.models.rope import Scaling, as_scaling, rotary_gain, rotary_rates


@remember_arguments
def gemma(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    seq: int,
    window: Window,
    query_scale: float | None = None,
    rope_base: float = 10_000,
    rope_scaling: Scaling | float | None = None,
    window_rope_base: float | None = None,
    norm_epsilon: float = 1e-6,
    qk_norm: bool = False,
    attention_cap: float | None = None,
    logit_cap: float | None = None,
    tied: bool = True,
    quant: Quant = None,
) -> Decoder:
    """Build a Gemma 2 or 3: a model with `model.init(key)` and `model.loss(params, batch, key)`.

    It is a `js.models.llama` with these differences: embeddings are multiplied by sqrt(width); RMS norms multiply by
    1 + scale, and come before and after attention and MLP; the gate is a GELU (tanh form); blocks with a window and
    blocks with full attention alternate. Activations that `remat` policies can name are those of `js.models.llama`.

    Args:
      vocab, width, depth, heads, kv_heads, head_dim, hidden, seq: as in `js.models.llama`.
      window: a list with the window of each block, None for full attention; or one window for all blocks.
      query_scale: the logits of attention are divided by the square root of this number; `head_dim` by default.
      rope_base: base of the rotary angles.
      rope_scaling: the scaling of the rotary angles, as in `js.models.llama`.
      window_rope_base: base of the rotary angles, without scaling, in blocks with a window, as in Gemma 3; by default
        these blocks have the same angles as the other blocks.
      norm_epsilon: the constant that RMS norms add to the mean square.
      qk_norm: apply an RMS norm to every head of queries and keys, as Gemma 3 does.
      attention_cap: logits x of attention become cap * tanh(x / cap), as in Gemma 2; None for no cap.
      logit_cap: the same cap for the logits of the vocabulary.
      tied: use the token embedding as the output matrix.
      quant: "int8" or "fp8" to compute the products of the blocks' weights in 8 bits, or rules of qwix, as in
        `js.models.llama`.

    Returns:
      The model, a `js.Stacked` that every engine can run.

    Raises:
      ValueError: a size below 1, or an invalid size, window or factor.
      TypeError: a size that is not an integer.

    Sources: Gemma Team 2024, "Gemma 2", section 2; Gemma Team 2025, "Gemma 3 Technical Report", section 2.

    Example:
        model = js.models.gemma(
            vocab=256, width=64, depth=2, heads=4, kv_heads=2, head_dim=16, hidden=128, seq=64, window=[32, None]
        )
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    check_sizes("gemma", sizes | {"seq": seq, "head_dim": head_dim})
    if head_dim % 2 or heads % kv_heads:
        raise ValueError(f"gemma: head_dim {head_dim} must be even, and heads {heads} divisible by kv_heads {kv_heads}")
    bases = {"rope_base": rope_base, "window_rope_base": 2.0 if window_rope_base is None else window_rope_base}
    factors = {"query_scale": query_scale, "attention_cap": attention_cap, "logit_cap": logit_cap}
    wrong = {name: x for name, x in bases.items() if x <= 1}
    wrong |= {name: x for name, x in factors.items() if x is not None and x <= 0}
    if wrong or norm_epsilon < 0:
        raise ValueError(
            f"gemma: bases must be above 1, scale and caps above 0, norm_epsilon not negative, got "
            f"{wrong or norm_epsilon}"
        )
    windows = check_window("gemma", window, depth)
    embedding, norm = Embedding(vocab, width), partial(Norm, norm_epsilon, name="norm")
    written = Block(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, window=windows,
        query_scale=head_dim if query_scale is None else query_scale, rope_base=rope_base,
        rope_scaling=as_scaling(rope_scaling), window_rope_base=window_rope_base, norm_epsilon=norm_epsilon,
        qk_norm=qk_norm, cap=attention_cap, residual_stddev=residual_stddev(depth),
    )  # fmt: skip
    one_block = quantize(written, quant)

    def embed(params: PyTree, tokens_BT: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        x_BTC = apply(embedding, params["embed"], tokens_BT)
        return constrain(x_BTC * jnp.asarray(width**0.5, x_BTC.dtype), RESIDUAL, grad=WHOLE_ROWS)

    def block(params: PyTree, x_BTC: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        return apply(one_block, params, x_BTC, rows)

    def matrix(params: PyTree) -> jax.Array:
        embedding, head = params["embed"], params["head"]
        found: jax.Array = embedding["embed_tokens"]["embedding"] if tied else head["lm_head"]["kernel"]
        return found

    def normalize(params: PyTree, x_BTC: jax.Array) -> jax.Array:
        return apply(Output(None, norm), params["head"], x_BTC)

    init = init_parts(embedding, one_block, Output(None if tied else vocab, norm), width)
    numbered = isinstance(windows, tuple)
    return Decoder("gemma", seq, embed, block, normalize, matrix, tied, depth, init, numbered, logit_cap)


class Norm(nn.Module):
    """RMS norm over the last dimension, as in Gemma: the normalized x times (1 + scale), computed in f32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:]).astype(jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * (1 + scale)).astype(x.dtype)


class Block(nn.Module):
    """A transformer block of Gemma: x += norm(attention(norm(x))), then x += norm(mlp(norm(x))), for x[B, T, C]."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    window: int | tuple[int | None, ...] | None
    query_scale: float
    rope_base: float
    rope_scaling: Scaling | None
    window_rope_base: float | None
    norm_epsilon: float
    qk_norm: bool
    cap: float | None
    residual_stddev: float

    @nn.compact
    def __call__(self, x_BTC: jax.Array, rows: Rows | None = None) -> jax.Array:
        rows = rows or Rows()
        h_BTC = self._attend(enter_tensor_region(self._norm("attn_norm", x_BTC)), rows)
        x_BTC = x_BTC + self._norm("attn_post_norm", h_BTC)
        h_BTC = enter_tensor_region(self._norm("mlp_norm", x_BTC))
        h_BTC = gated_mlp(h_BTC, self.hidden, self.residual_stddev, nn.gelu)
        return x_BTC + self._norm("mlp_post_norm", h_BTC)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        normed: jax.Array = Norm(self.norm_epsilon, name=name)(x)
        return normed

    def _attend(self, h_BTC: jax.Array, rows: Rows) -> jax.Array:
        C, D, init = h_BTC.shape[-1], self.head_dim, nn.initializers.normal(STDDEV)
        residual_init = nn.initializers.normal(self.residual_stddev)
        q_BTHD = constrain(dense("q_proj", h_BTC, (self.heads, D), init), HEADS)
        k_BTKD = constrain(dense("k_proj", h_BTC, (self.kv_heads, D), init), KV_HEADS)
        v_BTKD = constrain(dense("v_proj", h_BTC, (self.kv_heads, D), init), KV_HEADS)
        if self.qk_norm:
            q_BTHD, k_BTKD = self._norm("q_norm", q_BTHD), self._norm("k_norm", k_BTKD)
        rates, gain = self._rotation(rows.block)
        q_BTHD, k_BTKD = (turn(x, rates, gain, rows.positions) for x in (q_BTHD, k_BTKD))
        if self.query_scale != D:
            q_BTHD = q_BTHD * jnp.asarray((D / self.query_scale) ** 0.5, q_BTHD.dtype)
        q_BTHD, k_BTKD, v_BTKD = (checkpoint_name(x, "qkv") for x in (q_BTHD, k_BTKD, v_BTKD))
        window = window_of(self.window, rows.block)
        h_BTHD = attention(
            q_BTHD, k_BTKD, v_BTKD, causal=True, window=window, segment_ids=rows.segment_ids, soft_cap=self.cap
        )
        h_BTC = constrain(dense("o_proj", constrain(h_BTHD, HEADS), (C,), residual_init), RESIDUAL)
        named: jax.Array = checkpoint_name(h_BTC, "attention_proj")
        return named

    def _rotation(self, number_B: jax.Array | None) -> tuple[jax.Array, float | jax.Array]:
        """Return (rates, gain) of the rotary positions of this block.

        rates is the rotation of each pair of dimensions in radians per position, [D / 2]; gain is a factor of rotated
        queries and keys. In a model whose blocks have different windows, `number_B` is the index of the block, one copy
        per row, and rates is [B, 1, 1, D / 2].
        """
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        rates = {True: rotary_rates(self.head_dim, self.rope_base, self.rope_scaling)}
        gains = {True: rotary_gain(self.rope_scaling)}
        rates[False], gains[False] = rates[True], gains[True]
        if self.window_rope_base is not None:
            rates[False], gains[False] = rotary_rates(self.head_dim, self.window_rope_base), 1.0
        each = [window is None for window in windows]
        if number_B is None:
            return jnp.asarray(rates[each[0]], jnp.float32), gains[each[0]]
        rates_B11D = jnp.asarray([rates[one] for one in each], jnp.float32)[number_B][:, None, None]
        if gains[True] == gains[False]:
            return rates_B11D, gains[True]
        return rates_B11D, jnp.asarray([gains[one] for one in each], jnp.float32)[number_B][:, None, None, None]
