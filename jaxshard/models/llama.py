"""Llama 3 as a `js.Stacked` model of Flax modules, and its ready-made sizes. `models/decoder.py` describes the batch.

Shape suffixes: B rows, T positions, C width, F the MLP's hidden width, H heads, K heads of keys and values, D the
width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxshard.core.constrain import constrain
from jaxshard.core.types import PyTree
from jaxshard.layers.attention.attention import attention
from jaxshard.layers.positions import positions
from jaxshard.models.decoder import Decoder, Rows, remember_arguments
from jaxshard.models.parts import (
    HEADS,
    RESIDUAL,
    STDDEV,
    WHOLE_ROWS,
    Output,
    Window,
    apply,
    apply_to_rows,
    check_sizes,
    check_window,
    enter_tensor_region,
    init_parts,
    residual_stddev,
    window_of,
)
from jaxshard.models.quantize import Quant, quantize
from jaxshard.models.recipe import Recipe, Size
from jaxshard.models.rope import Scaling, as_scaling, rotary_gain, rotary_rates

KV_HEADS = ("batch", "context", "kv_heads", None)


@remember_arguments
def llama(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    seq: int,
    head_dim: int | None = None,
    rope_base: float = 500_000,
    rope_scaling: Scaling | float | None = None,
    norm_epsilon: float = 1e-5,
    qk_norm: bool | Literal["joint"] = False,
    qkv_bias: bool = False,
    norm_after: bool = False,
    window: Window = None,
    tied: bool = False,
    quant: Quant = None,
) -> Decoder:
    """Build a Llama 3: a model with `model.init(key)` and `model.loss(params, batch, key)`.

    RMS norms before attention and MLP, rotary positions, causal attention in which heads / kv_heads neighbouring heads
    share keys and values, a gated SiLU, and no biases. Mistral, Qwen2, Qwen3, Phi-3 and OLMo 2 are variants of this
    model. Weights are drawn from N(0, 0.02), output projections of attention and MLP from N(0, 0.02 / sqrt(2 depth)).
    Everything is computed in the dtype of the parameters; statistics of norms, angles, softmax and loss are in f32.

    The loss is a `js.Mean` of nats per token; in evaluation there is also a metric "accuracy".

    Activations that `remat` policies of engines can name:

    - "block_in": the residual stream x[B, T, C] at a block's input, which is always saved;
    - "qkv": queries, keys and values, rotated;
    - "attention_out": the output of `js.attention`, and the logsumexp for its backward pass;
    - "attention_proj": the output projection of attention, [B, T, C], summed over a tensor axis: if it is saved, the
      backward pass does not repeat the all-reduce;
    - "mlp_hidden": the products of the gated MLP with its gate and its up matrix, [B, T, F] each.

    Args:
      vocab: the number of token ids.
      width: the width C of the residual stream.
      depth: the number of blocks.
      heads: the number of query heads.
      kv_heads: the number of heads of keys and values, a divisor of `heads`. If a tensor axis does not divide it, keys
        and values and their projection matrices are not split.
      hidden: the MLP's hidden width.
      seq: the largest number of positions in a row.
      head_dim: the width D of a head, an even number; by default width / heads.
      rope_base: base b of the rotary angles, b^(-2 i / head_dim) radians per position for pair i of dimensions.
      rope_scaling: the scaling of the rotary angles, such as `js.models.RopeScaling(...)` or
        `js.models.YarnScaling(...)`; a number is the factor of a `RopeScaling`, whose other values are Llama 3.1's
        (there the factor is 8).
      norm_epsilon: the constant that RMS norms add to the mean square.
      qk_norm: apply an RMS norm to every head of queries and keys, as Qwen3 does; "joint" for one norm over all heads
        of queries and one over all heads of keys, as in OLMo 2.
      qkv_bias: add biases to queries, keys and values, as Qwen2 does.
      norm_after: apply the RMS norms to the outputs of attention and MLP, before they are added, as OLMo 2 does,
        instead of to their inputs.
      window: a position attends to fewer than this many positions before it, as in Mistral; or a list with the window
        of each block; None for full attention.
      tied: use the token embedding as the output matrix.
      quant: "int8" or "fp8" to compute the products of the blocks' weights in 8 bits, or rules of qwix; see
        `js.models.quant_rules`. Embedding, output matrix and attention's own products are never rounded.

    Returns:
      The model, a `js.Stacked` that every engine can run.

    Raises:
      ValueError: a size below 1, sizes that do not divide each other, a `rope_base` of at most 1, or an invalid scaling
        or epsilon.
      TypeError: a size that is not an integer.

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.2; Su et al. 2021, "RoFormer".

    Example:
        model = js.models.llama(vocab=256, width=64, depth=2, heads=4, kv_heads=2, hidden=128, seq=64)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    check_sizes("llama", sizes | {"seq": seq} | ({} if head_dim is None else {"head_dim": head_dim}))
    if head_dim is None and (width % heads or width // heads % 2):
        raise ValueError(
            f"llama: width {width} over heads {heads} must give heads of an even size; pass a multiple of {2 * heads}, "
            "or head_dim"
        )
    D = head_dim or width // heads
    if D % 2:
        raise ValueError(f"llama: head_dim must be even, got {D}: rotary positions turn pairs of dimensions")
    if heads % kv_heads:
        raise ValueError(f"llama: heads {heads} is not divisible by kv_heads {kv_heads}; pass a divisor of {heads}")
    if rope_base <= 1:
        raise ValueError(f"llama: rope_base must be above 1, got {rope_base}")
    if qk_norm not in (False, True, "joint"):
        raise ValueError(f'llama: qk_norm must be False, True or "joint", got {qk_norm!r}')
    if norm_epsilon < 0:
        raise ValueError(f"llama: norm_epsilon must not be negative, got {norm_epsilon}")
    scaling, windows = as_scaling(rope_scaling), check_window("llama", window, depth)

    embedding = Embedding(vocab, width)
    attends = (heads, kv_heads, D, rope_base, scaling, norm_epsilon, residual_stddev(depth))
    written = Block(*attends, qk_norm=qk_norm, qkv_bias=qkv_bias, norm_after=norm_after, window=windows, hidden=hidden)
    one_block = quantize(written, quant)
    norm = partial(nn.RMSNorm, epsilon=norm_epsilon, name="norm")

    def embed(params: PyTree, tokens_BT: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        return constrain(apply(embedding, params["embed"], tokens_BT), RESIDUAL, grad=WHOLE_ROWS)

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
    return Decoder("llama", seq, embed, block, normalize, matrix, tied, depth, init, numbered)


def _llama3(width: int, depth: int, heads: int, hidden: int, learning_rate: float) -> Size:
    # Table 3 of Grattafiori et al. 2024, with the vocabulary of the published weights, which pads 128,000 tokens;
    # batch (the first one), warm-up and steps of its section 3.4.1, which are the 405B's. Llama 3.1, which reads rows
    # of 131,072, is seq=131_072, rope_scaling=8.
    shape = {
        "vocab": 128_256, "width": width, "depth": depth, "heads": heads, "kv_heads": 8, "hidden": hidden, "seq": 8192,
        "rope_base": 500_000,
    }  # fmt: skip
    return Size(shape, Recipe(batch=512, steps=1_200_000, learning_rate=learning_rate, warmup=8000), llama, "nothing")


SIZES = {
    # Not tuned: gpt-1m's recipe. On the standard library 1.67 nats per held-out byte (one seed), in 67 CPU seconds.
    "llama-1m": Size(
        {"vocab": 256, "width": 144, "depth": 4, "heads": 8, "kv_heads": 4, "hidden": 384, "seq": 32},
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=80),
        llama,
        "everything",
    ),
    # Table 1 and section 2.2 of Touvron et al. 2023, "Llama 2": 2T tokens, 4M a step, rows of 4096. The shape is that
    # of table 2 in their "LLaMA", with the MLP's width of the published weights (two thirds of 4 width, rounded up to a
    # multiple of 256).
    "llama2-7b": Size(
        {
            "vocab": 32_000, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "hidden": 11_008, "seq": 4096,
            "rope_base": 10_000,
        },
        Recipe(batch=1024, steps=500_000, learning_rate=3e-4, warmup=2000),
        llama,
        "nothing",
    ),
    "llama3-8b": _llama3(4096, 32, 32, 14_336, 3e-4),
    "llama3-70b": _llama3(8192, 80, 64, 28_672, 1.5e-4),
    "llama3-405b": _llama3(16_384, 126, 128, 53_248, 8e-5),
}  # fmt: skip
"""Ready-made sizes of this family; `js.models.SIZES` has those of all families."""


class Embedding(nn.Module):
    """Map tokens[B, T] to their embeddings x[B, T, C]."""

    vocab: int
    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        init = nn.initializers.normal(STDDEV)
        tokens_BTC = nn.Embed(self.vocab, self.width, embedding_init=init, name="embed_tokens")(tokens_BT)
        return constrain(tokens_BTC, WHOLE_ROWS)


class Attention(nn.Module):
    """Compute x + attention(rms_norm(x)) for x[B, T, C], with grouped queries and rotary positions.

    With `norm_after` it computes x + rms_norm(attention(x)).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    rope_scaling: Scaling | None
    norm_epsilon: float
    residual_stddev: float
    qk_norm: bool | Literal["joint"] = False
    qkv_bias: bool = False
    norm_after: bool = False
    window: int | tuple[int | None, ...] | None = None

    @nn.compact
    def __call__(self, x_BTC: jax.Array, rows: Rows | None = None) -> jax.Array:
        return self.attend(x_BTC, rows)

    def attend(self, x_BTC: jax.Array, rows: Rows | None = None) -> jax.Array:
        """Compute x + attention(rms_norm(x)) for x[B, T, C].

        A subclass calls this method in its own `__call__`, because a Flax class may have only one compact method.
        """
        C, D, rows = x_BTC.shape[-1], self.head_dim, rows or Rows()
        init, residual_init = nn.initializers.normal(STDDEV), nn.initializers.normal(self.residual_stddev)
        norm = nn.RMSNorm(epsilon=self.norm_epsilon, name="attn_norm")
        h_BTC = enter_tensor_region(x_BTC if self.norm_after else norm(x_BTC))
        q_BTHD = constrain(dense("q_proj", h_BTC, (self.heads, D), init, self.qkv_bias), HEADS)
        k_BTKD = constrain(dense("k_proj", h_BTC, (self.kv_heads, D), init, self.qkv_bias), KV_HEADS)
        v_BTKD = constrain(dense("v_proj", h_BTC, (self.kv_heads, D), init, self.qkv_bias), KV_HEADS)
        if self.qk_norm:
            dims = (-2, -1) if self.qk_norm == "joint" else -1
            norm_of = partial(nn.RMSNorm, epsilon=self.norm_epsilon, reduction_axes=dims, feature_axes=dims)
            q_BTHD, k_BTKD = norm_of(name="q_norm")(q_BTHD), norm_of(name="k_norm")(k_BTKD)
        q_BTHD, k_BTKD = (rotate(x, self.rope_base, self.rope_scaling, rows.positions) for x in (q_BTHD, k_BTKD))
        q_BTHD, k_BTKD, v_BTKD = (checkpoint_name(x, "qkv") for x in (q_BTHD, k_BTKD, v_BTKD))
        window = window_of(self.window, rows.block)
        h_BTHD = attention(q_BTHD, k_BTKD, v_BTKD, causal=True, window=window, segment_ids=rows.segment_ids)
        h_BTC = constrain(dense("o_proj", constrain(h_BTHD, HEADS), (C,), residual_init), RESIDUAL)
        h_BTC = checkpoint_name(h_BTC, "attention_proj")
        attended: jax.Array = x_BTC + (norm(h_BTC) if self.norm_after else h_BTC)
        return attended


class Block(Attention):
    """A transformer block of Llama: x += attention(rms_norm(x)), then x += mlp(rms_norm(x)), for x[B, T, C]."""

    hidden: int = 0

    @nn.compact
    def __call__(self, x_BTC: jax.Array, rows: Rows | None = None) -> jax.Array:
        x_BTC = self.attend(x_BTC, rows)
        norm = nn.RMSNorm(epsilon=self.norm_epsilon, name="mlp_norm")
        h_BTC = enter_tensor_region(x_BTC if self.norm_after else norm(x_BTC))
        h_BTC = gated_mlp(h_BTC, self.hidden, self.residual_stddev)
        return x_BTC + (norm(h_BTC) if self.norm_after else h_BTC)


def gated_mlp(
    h_BTC: jax.Array,
    hidden: int,
    residual_stddev: float,
    activation: Callable[[jax.Array], jax.Array] = nn.silu,
) -> jax.Array:
    """Apply a gated MLP, down(activation(gate(h)) * up(h)), to h[B, T, C]; return [B, T, C].

    Call it in a compact method of a Flax module: its three matrices become the module's parameters "gate_proj",
    "up_proj" and "down_proj".
    """
    init = nn.initializers.normal(STDDEV)
    gate_BTF = constrain(dense("gate_proj", h_BTC, (hidden,), init), ("batch", "context", "mlp"))
    up_BTF = constrain(dense("up_proj", h_BTC, (hidden,), init), ("batch", "context", "mlp"))
    gate_BTF, up_BTF = (checkpoint_name(x, "mlp_hidden") for x in (gate_BTF, up_BTF))
    h_BTF, residual_init = gated(activation, gate_BTF, up_BTF), nn.initializers.normal(residual_stddev)
    return constrain(dense("down_proj", h_BTF, h_BTC.shape[-1:], residual_init), RESIDUAL)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gated(activation: Callable[[jax.Array], jax.Array], gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute `activation(gate) * up`, once in the forward pass, and both of its gradients once in the backward pass.

    Compilers for TPUs otherwise compute it, and its gradients, again inside each matrix product that reads them. These
    products take longer then, and what they compute from stays in memory until the last of them.
    """
    product: jax.Array = jax.lax.optimization_barrier(activation(gate) * up)
    return product


@gated.defjvp
def _gated_jvp(activation: Any, inputs: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> Any:
    # The transpose of this barrier is a barrier after the two gradients. A barrier before the product, whose derivative
    # is the same, would keep the compiler from computing the product at the end of the matrix products before it.
    tangents = jax.lax.optimization_barrier(tangents)
    _, tangent = jax.jvp(lambda gate, up: activation(gate) * up, inputs, tangents)
    return gated(activation, *inputs), tangent


def dense(
    name: str, x: jax.Array, features: tuple[int, ...], init: nn.initializers.Initializer, bias: bool = False
) -> jax.Array:
    """Apply a dense layer to x[B, T, ...]: contract all dimensions after [B, T], and return [B, T, *features].

    Call it in a compact method of a Flax module: its kernel becomes the module's parameter `name`.
    """
    inputs = tuple(range(2 - x.ndim, 0))
    layer = nn.DenseGeneral(features, axis=inputs, use_bias=bias, kernel_init=init, name=name)
    return apply_to_rows(layer, x)


def rotate(
    x_BTHD: Float[Array, "batch seq heads dim"],
    base: float,
    scaling: Scaling | None = None,
    at: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Apply rotary positions: rotate the dimensions (i, i + D / 2) at position t by t * base^(-2 i / D) radians.

    The positions are `at`. By default they are the indices 0, 1, ... in the full row, also on a device that has only
    some positions of the row. Computed in f32. Source: Su et al. 2021, "RoFormer", section 3.2, with the pairs of
    dimensions as in Hugging Face's weights of Llama. `scaling` changes the angles for longer rows, such as
    `js.models.RopeScaling(...)`.
    """
    rates = jnp.asarray(rotary_rates(x_BTHD.shape[3], base, scaling), jnp.float32)
    return turn(x_BTHD, rates, rotary_gain(scaling), at)


def turn(
    x_BTHD: Float[Array, "batch seq heads dim"],
    rates: jax.Array,
    gain: float | jax.Array = 1.0,
    at: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Rotate the pairs of dimensions (i, i + D / 2) at position t by t * rates[i] radians, and multiply by `gain`.

    `rates` is [D / 2], or [B, 1, 1, D / 2] with different rates for each row. The positions are `at`, by default 0, 1,
    2, ...
    """
    at = positions(x_BTHD.shape[1]) if at is None else at
    angles_T1D = at.astype(jnp.float32)[..., None, None] * rates  # or [B, T, 1, D / 2]
    cos, sin = jnp.cos(angles_T1D), jnp.sin(angles_T1D)
    first, second = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    if not isinstance(gain, float) or gain != 1:
        rotated = rotated * gain
    return rotated.astype(x_BTHD.dtype)
