"""GPT-2 as a `js.Stacked` model of Flax modules, and its ready-made sizes. `models/decoder.py` describes the batch.

Shape suffixes: B rows, T positions, C width, F the MLP's width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxshard.core.constrain import constrain
from jaxshard.core.keys import row_keys
from jaxshard.core.types import PyTree
from jaxshard.layers.attention.attention import attention
from jaxshard.layers.positions import count_in_row, has_part, positions
from jaxshard.models.decoder import Decoder, Rows, remember_arguments
from jaxshard.models.parts import (
    HEADS,
    RESIDUAL,
    STDDEV,
    WHOLE_ROWS,
    Output,
    apply,
    apply_to_rows,
    check_sizes,
    enter_tensor_region,
    init_parts,
    residual_stddev,
)
from jaxshard.models.quantize import Quant, quantize
from jaxshard.models.recipe import Recipe, Size


@remember_arguments
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
    quant: Quant = None,
) -> Decoder:
    """Build a GPT-2: a model with `model.init(key)` and `model.loss(params, batch, key)`.

    Layer norms before attention and MLP, learned positions, causal attention, GELU (tanh form), and biases everywhere
    except in the output matrix. Weights are drawn from N(0, 0.02), output projections of attention and MLP from
    N(0, 0.02 / sqrt(2 depth)). Everything is computed in the dtype of the parameters; layer-norm statistics,
    softmax and loss are in f32.

    The loss is a `js.Mean` of nats per token; in evaluation there is also a metric "accuracy".

    Activations that `remat` policies of engines can name:

    - "block_in": the residual stream x[B, T, C] at a block's input, which is always saved;
    - "qkv": queries, keys and values, one array;
    - "attention_out": the output of `js.attention`, and the logsumexp for its backward pass;
    - "attention_proj": the output projection of attention, [B, T, C], summed over a tensor axis: if it is saved, the
      backward pass does not repeat the all-reduce;
    - "mlp_hidden": the input of the MLP's GELU, [B, T, F].

    Args:
      vocab: the number of token ids.
      width: the width C of the residual stream, a multiple of `heads`.
      depth: the number of blocks.
      heads: the number of attention heads.
      seq: the largest number of positions in a row.
      dropout: the fraction of entries that training drops from the embeddings, and from the outputs of attention and
        MLP in every block. Each row has its own random key (`js.row_keys`), so every engine drops the same entries.
      tied: use the token embedding as the output matrix.
      expansion: the MLP's width divided by `width`.
      quant: "int8" or "fp8" to compute the products of the blocks' weights in 8 bits, or rules of qwix; see
        `js.models.quant_rules`. Embedding, output matrix and attention's own products are never rounded.

    Returns:
      The model, a `js.Stacked` that every engine can run.

    Raises:
      ValueError: a size below 1, a width that `heads` does not divide, a dropout outside [0, 1), or another
        `quant`.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.

    Example:
        model = js.models.gpt(vocab=256, width=64, depth=2, heads=4, seq=64)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "seq": seq, "expansion": expansion}
    check_sizes("gpt", sizes)
    if width % heads:
        raise ValueError(f"gpt: width {width} is not divisible by heads {heads}; pass a multiple of {heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"gpt: dropout must be in [0, 1), got {dropout}")

    embedding = Embedding(vocab, seq, width)
    one_block = quantize(Block(heads, expansion, dropout, residual_stddev(depth)), quant)
    norm = partial(nn.LayerNorm, epsilon=1e-5, name="ln_f")

    def embed(params: PyTree, tokens_BT: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        x_BTC = apply(embedding, params["embed"], tokens_BT, rows.positions)
        x_BTC = constrain(x_BTC, RESIDUAL, grad=WHOLE_ROWS)
        return _drop(x_BTC, dropout, _dropout_keys(key, dropout, len(tokens_BT)), 0)

    def block(params: PyTree, x_BTC: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        return apply(one_block, params, x_BTC, _dropout_keys(key, dropout, len(x_BTC)), rows.segment_ids)

    def matrix(params: PyTree) -> jax.Array:
        found: jax.Array = params["embed"]["wte"]["embedding"] if tied else params["head"]["lm_head"]["kernel"]
        return found

    def normalize(params: PyTree, x_BTC: jax.Array) -> jax.Array:
        return apply(Output(None, norm), params["head"], x_BTC)

    init = init_parts(embedding, one_block, Output(None if tied else vocab, norm), width)
    return Decoder("gpt", seq, embed, block, normalize, matrix, tied, num_blocks=depth, init=init)


def _gpt2(width: int, depth: int, heads: int, learning_rate: float, remat: str) -> Size:
    # Table 2 of Radford et al. 2019; rates of Brown et al. 2020, table 2.1, for the sizes nearest to these.
    shape = {"vocab": 50257, "width": width, "depth": depth, "heads": heads, "seq": 1024}
    return Size(shape, Recipe(batch=512, steps=100_000, learning_rate=learning_rate, warmup=2000), gpt, remat)


SIZES = {
    # On the standard library: 1.93 nats per held-out byte (two seeds), in 50 CPU seconds on one device. The warm-up is
    # long because the gradient is not clipped: with 30 warm-up steps and 3e-3 the loss stays above 2.2.
    "gpt-1m": Size(
        {"vocab": 256, "width": 144, "depth": 4, "heads": 8, "seq": 32},
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=80),
        gpt,
        "everything",
    ),
    # Not tuned.
    "gpt-10m": Size(
        {"vocab": 256, "width": 384, "depth": 6, "heads": 8, "seq": 256},
        Recipe(batch=64, steps=2000, learning_rate=1e-3, warmup=100),
        gpt,
        "everything",
    ),
    "gpt2": _gpt2(768, 12, 12, 6e-4, "everything"),
    "gpt2-medium": _gpt2(1024, 24, 16, 3e-4, "everything"),
    "gpt2-large": _gpt2(1280, 36, 20, 2.5e-4, "nothing"),
    "gpt2-xl": _gpt2(1600, 48, 25, 2e-4, "nothing"),
}
"""Ready-made sizes of this family; `js.models.SIZES` has those of all families."""


class Embedding(nn.Module):
    """Map tokens[B, T] to x[B, T, C]: the token embedding plus a learned embedding of the position."""

    vocab: int
    seq: int
    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, at_BT: jax.Array | None = None) -> jax.Array:
        init = nn.initializers.normal(STDDEV)
        tokens_BTC = nn.Embed(self.vocab, self.width, embedding_init=init, name="wte")(tokens_BT)
        tokens_BTC = constrain(tokens_BTC, WHOLE_ROWS)
        positions_TC: jax.Array = self.param("wpe", init, (self.seq, self.width))
        if at_BT is None and not has_part():
            return tokens_BTC + positions_TC[: tokens_BT.shape[1]]
        return tokens_BTC + positions_TC[positions(tokens_BT.shape[1]) if at_BT is None else at_BT]


class Block(nn.Module):
    """A transformer block of GPT-2: x += attention(layer_norm(x)), then x += mlp(layer_norm(x)), for x[B, T, C]."""

    heads: int
    expansion: int
    dropout: float
    residual_stddev: float

    @nn.compact
    def __call__(
        self, x_BTC: jax.Array, keys_B: jax.Array | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        C = x_BTC.shape[-1]
        init, residual_init = nn.initializers.normal(STDDEV), nn.initializers.normal(self.residual_stddev)

        def dense(name: str, x: jax.Array, features: int, init: nn.initializers.Initializer) -> jax.Array:
            return apply_to_rows(nn.Dense(features, kernel_init=init, name=name), x)

        h_BTC = enter_tensor_region(nn.LayerNorm(epsilon=1e-5, name="ln_1")(x_BTC))
        h_BTC = _attend(checkpoint_name(dense("qkv", h_BTC, 3 * C, init), "qkv"), self.heads, segments_BT)
        h_BTC = checkpoint_name(constrain(dense("attn_out", h_BTC, C, residual_init), RESIDUAL), "attention_proj")
        x_BTC = x_BTC + _drop(h_BTC, self.dropout, keys_B, 0)

        h_BTC = enter_tensor_region(nn.LayerNorm(epsilon=1e-5, name="ln_2")(x_BTC))
        h_BTF = checkpoint_name(dense("mlp_in", h_BTC, self.expansion * C, init), "mlp_hidden")
        h_BTF = constrain(nn.gelu(h_BTF), ("batch", "context", "mlp"))
        h_BTC = constrain(dense("mlp_out", h_BTF, C, residual_init), RESIDUAL)
        return x_BTC + _drop(h_BTC, self.dropout, keys_B, 1)


def _attend(qkv_BTX: jax.Array, heads: int, segments_BT: jax.Array | None) -> jax.Array:
    """Apply causal attention to concatenated queries, keys and values [B, T, 3 C]; return [B, T, C].

    The 3 C columns are ordered by head, with (q, k, v) within each head, so that a tensor axis does not cut heads
    (Megatron-LM and GPT-NeoX do the same). GPT-2's published weights are ordered by (q, k, v) first.
    """
    B, T, X = qkv_BTX.shape
    qkv_BTHX = constrain(qkv_BTX.reshape(B, T, heads, 3, X // (3 * heads)), (*HEADS, None))
    q_BTHD, k_BTHD, v_BTHD = (constrain(qkv_BTHX[:, :, :, i], HEADS) for i in range(3))
    x_BTHD = attention(q_BTHD, k_BTHD, v_BTHD, causal=True, segment_ids=segments_BT)
    return constrain(x_BTHD, HEADS).reshape(B, T, X // 3)


def _dropout_keys(key: jax.Array | None, dropout: float, rows: int) -> jax.Array | None:
    """Return one random key per row; None without dropout."""
    return None if key is None or dropout == 0 else row_keys(key, rows)


def _drop(x_BTC: jax.Array, rate: float, keys_B: jax.Array | None, call: int) -> jax.Array:
    """Apply dropout to x[B, T, C], with one random key per row; without keys return x unchanged.

    Each use of the same key passes a different number `call`, so that it drops different entries.
    """
    if keys_B is None:
        return x_BTC

    T, C = x_BTC.shape[1:]

    def keep(key: jax.Array) -> jax.Array:
        kept_TC = jax.random.bernoulli(jax.random.fold_in(key, call), 1 - rate, (count_in_row(T), C))
        return kept_TC[positions(T)] if has_part() else kept_TC

    return jnp.where(jax.vmap(keep)(keys_B), x_BTC / (1 - rate), 0).astype(x_BTC.dtype)
