"""GPT-2 of Flax modules as a `Stacked` model, its ready-made sizes, and text sampled from it.

The batch is {"tokens": int32[B, T + 1]} and optionally {"weights": float[B, T] or float[B]}: position t predicts token
t + 1, and a prediction counts with its weight (without weights: one). Any T up to the model's `seq` will do.

Shape suffixes: B rows, T positions, N = B T, C width, F the MLP's width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxshard._constrain import constrain, splits
from jaxshard._cross_entropy import cross_entropy
from jaxshard._keys import row_keys
from jaxshard._loss import Loss, Mean
from jaxshard._typing import PyTree
from jaxshard.adapt.stacked import BLOCKS, Stacked

_STDDEV = 0.02

_RESIDUAL = ("batch", "sequence", None)
"""Activations between blocks: split along the sequence where a rule says so."""

_HEADS = ("batch", None, "heads", None)

_WHOLE = ("batch", None, None)


def _enter(x_BTC: jax.Array) -> jax.Array:
    """What enters column-parallel layers: whole rows; the gradient is scattered again."""
    return constrain(x_BTC, _WHOLE, grad=_RESIDUAL)


class Recipe(NamedTuple):
    """How a size is trained when nothing else is said: global rows per step, steps, and the numbers of `adamw`."""

    batch: int
    steps: int
    learning_rate: float
    warmup: int
    b2: float = 0.95
    weight_decay: float = 0.1

    def optimizer(self, steps: int | None = None) -> optax.GradientTransformation:
        """AdamW with a linear warm-up and a cosine down to a twentieth, over `steps` steps (the recipe's by default).

        Elementwise: it runs on whatever shards the parameters are stored in.
        """
        steps = self.steps if steps is None else steps
        warmup = min(self.warmup, steps // 4)
        peak = self.learning_rate
        rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, max(steps, 1), peak / 20)
        return optax.adamw(rate, b2=self.b2, weight_decay=self.weight_decay)


class Size(NamedTuple):
    """A ready-made model: the arguments of `gpt`, and a recipe to train it."""

    shape: dict[str, int]
    recipe: Recipe


def _gpt2(width: int, depth: int, heads: int, learning_rate: float) -> Size:
    # Table 2 of Radford et al. 2019; rates of Brown et al. 2020, table 2.1, for the sizes nearest to these.
    shape = {"vocab": 50257, "width": width, "depth": depth, "heads": heads, "seq": 1024}
    return Size(shape, Recipe(batch=512, steps=100_000, learning_rate=learning_rate, warmup=2000))


SIZES: dict[str, Size] = {
    # On the standard library: 1.93 nats per held-out byte (two seeds), in 50 CPU seconds on one device. The warm-up is
    # long because nothing clips the gradient: with 30 steps of it and 3e-3 the loss stays above 2.2.
    "gpt-1m": Size(
        {"vocab": 256, "width": 144, "depth": 4, "heads": 8, "seq": 32},
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=100),
    ),
    # Not tuned.
    "gpt-10m": Size(
        {"vocab": 256, "width": 384, "depth": 6, "heads": 8, "seq": 256},
        Recipe(batch=64, steps=2000, learning_rate=1e-3, warmup=100),
    ),
    "gpt2": _gpt2(768, 12, 12, 6e-4),
    "gpt2-medium": _gpt2(1024, 24, 16, 3e-4),
    "gpt2-large": _gpt2(1280, 36, 20, 2.5e-4),
    "gpt2-xl": _gpt2(1600, 48, 25, 2e-4),
}
"""Ready-made sizes; `gpt(**SIZES["gpt2"].shape | {"vocab": 256})` is one of them with another vocabulary."""


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
) -> Stacked:
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
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"gpt: sizes must be at least 1, got {wrong}")
    if width % heads:
        raise ValueError(f"gpt: width {width} is not divisible by heads {heads}; pass a multiple of {heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"gpt: dropout must be in [0, 1), got {dropout}")

    embedding = Embedding(vocab, seq, width)
    one_block = Block(heads, expansion, dropout, residual_stddev=_STDDEV / (2 * depth) ** 0.5)
    output = Output(None if tied else vocab)

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 3)
        x_BTC = jnp.zeros((1, 1, width))
        return {
            "embed": embedding.init(keys[0], jnp.zeros((1, 1), jnp.int32))["params"],
            "block": one_block.init(keys[1], x_BTC)["params"],
            "head": output.init(keys[2], x_BTC)["params"],
        }

    def embed(params: PyTree, batch: PyTree, key: jax.Array | None) -> jax.Array:
        tokens = _tokens(batch, seq)[:, :-1]
        x_BTC = constrain(_apply(embedding, params["embed"], tokens), _RESIDUAL, grad=_WHOLE)
        return _drop(x_BTC, dropout, _row_keys(key, dropout, len(tokens)), 0)

    def block(params: PyTree, x_BTC: jax.Array, key: jax.Array | None) -> jax.Array:
        return _apply(one_block, params, x_BTC, _row_keys(key, dropout, len(x_BTC)))

    def head(params: PyTree, x_BTC: jax.Array, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        logits_BTV = readout(params, x_BTC).astype(jnp.float32)
        targets_BT = batch["tokens"][:, 1:]
        weights_BT = _weights(batch, targets_BT.shape)
        nats_BT = cross_entropy(logits_BTV, targets_BT)
        weight = weights_BT.sum()
        loss = Mean((nats_BT * weights_BT).sum(), weight)
        if key is not None:
            return loss
        hits_BT = targets_BT == logits_BTV.argmax(axis=-1)
        return Loss(loss, metrics={"accuracy": Mean((hits_BT * weights_BT).sum(), weight)})

    return Stacked(embed, block, head, num_blocks=depth, init=init)


class Embedding(nn.Module):
    """x[B, T, C] of tokens[B, T]: token plus learned position embedding."""

    vocab: int
    seq: int
    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        init = nn.initializers.normal(_STDDEV)
        tokens_BTC = nn.Embed(self.vocab, self.width, embedding_init=init, name="wte")(tokens_BT)
        tokens_BTC = constrain(tokens_BTC, _WHOLE)
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
        init, residual_init = nn.initializers.normal(_STDDEV), nn.initializers.normal(self.residual_stddev)

        def dense(name: str, x: jax.Array, features: int, init: Any) -> jax.Array:
            layer = nn.Dense(features, kernel_init=init, name=name)
            # Positions that are split can't be scattered once they are merged with rows.
            return layer(x) if splits("sequence") else layer(x.reshape(B * T, -1)).reshape(B, T, features)

        h_BTC = _enter(nn.LayerNorm(epsilon=1e-5, name="ln_1")(x_BTC))
        h_BTC = _attend(dense("qkv", h_BTC, 3 * C, init), self.heads)
        h_BTC = constrain(dense("attn_out", h_BTC, C, residual_init), _RESIDUAL)
        x_BTC = x_BTC + _drop(h_BTC, self.dropout, keys_B, 0)

        h_BTC = _enter(nn.LayerNorm(epsilon=1e-5, name="ln_2")(x_BTC))
        h_BTF = constrain(nn.gelu(dense("mlp_in", h_BTC, self.expansion * C, init)), ("batch", None, "mlp"))
        h_BTC = constrain(dense("mlp_out", h_BTF, C, residual_init), _RESIDUAL)
        return x_BTC + _drop(h_BTC, self.dropout, keys_B, 1)


class Output(nn.Module):
    """The final layer norm, and logits[B, T, vocab] when there is a vocabulary (an untied output matrix)."""

    vocab: int | None

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BTC = _enter(nn.LayerNorm(epsilon=1e-5, name="ln_f")(x_BTC))
        if self.vocab is None:
            return x_BTC
        init = nn.initializers.normal(_STDDEV)
        return nn.Dense(self.vocab, use_bias=False, kernel_init=init, name="lm_head")(x_BTC)


def readout(params: PyTree, x_BTC: jax.Array) -> jax.Array:
    """logits[B, T, V] of the last block's output, tied or not as the parameters tell."""
    head = params["head"]
    if "lm_head" in head:
        return _apply(Output(head["lm_head"]["kernel"].shape[-1]), head, x_BTC)
    return _apply(Output(None), head, x_BTC) @ params["embed"]["wte"]["embedding"].T


def logits(model: Stacked, params: PyTree, tokens: jax.Array) -> jax.Array:
    """logits[B, T, V] in f32 for tokens[B, T]: position t predicts token t + 1. Nothing is dropped."""
    rest = {name: part for name, part in params.items() if name != BLOCKS}
    # embed takes a training row, whose last token is only a target.
    x_BTC = model.embed(rest, {"tokens": jnp.pad(tokens, ((0, 0), (0, 1)))}, None)
    x_BTC, _ = jax.lax.scan(lambda x, block: (model.block(block, x, None), None), x_BTC, params[BLOCKS])
    return readout(rest, x_BTC).astype(jnp.float32)


def sample(
    model: Stacked, params: PyTree, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float = 1.0
) -> jax.Array:
    """tokens[B, P + length]: the prompt[B, P] continued by drawn tokens, from whole parameters in model order.

    The model sees a fixed window, the last `seq` tokens, so that one compiled program draws all of them; nothing is
    cached, a token costs a forward pass. `temperature` divides the logits; 0 takes the likeliest token. Every row draws
    from a key of its own (`js.row_keys`). For a sharded state:

        generate = js.make_apply(partial(sample, model, length=256), layout)
        tokens = generate(run, prompt, key)
    """
    rows, given = prompt.shape
    if given < 1 or length < 1:
        raise ValueError(
            f"sample: the prompt needs at least 1 token and length must be at least 1, got {given}, {length}"
        )
    if temperature < 0:
        raise ValueError(f"sample: temperature must not be negative, got {temperature}")
    window = params["embed"]["wpe"].shape[0]
    keys_B = row_keys(key, rows)
    # What lies after the position that is drawn is zeros, or old, and never seen: attention is causal.
    tokens = jnp.zeros((rows, max(given + length, window)), jnp.int32).at[:, :given].set(prompt)

    def draw(position: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(position - window, 0)
        seen = jax.lax.dynamic_slice_in_dim(tokens, start, window, axis=1)
        logits_BV = logits(model, params, seen)[:, position - start - 1]
        if temperature == 0:
            drawn = logits_BV.argmax(-1)
        else:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, position)
            drawn = jax.vmap(jax.random.categorical)(keys, logits_BV / temperature)
        return tokens.at[:, position].set(drawn.astype(jnp.int32))

    return jax.lax.fori_loop(given, given + length, draw, tokens)[:, : given + length]


def _apply(module: nn.Module, params: PyTree, *args: Any) -> Any:
    return module.apply({"params": params}, *args)


def _attend(qkv_BTX: jax.Array, heads: int) -> jax.Array:
    """Causal attention, x[B, T, C] of the projection [B, T, 3 C].

    The 3 C columns are ordered head by head, (q, k, v) within each, so that splitting them over a tensor axis splits
    whole heads (Megatron-LM, GPT-NeoX); GPT-2's published weights are ordered (q, k, v) first.
    """
    B, T, X = qkv_BTX.shape
    qkv_BTHX = constrain(qkv_BTX.reshape(B, T, heads, 3, X // (3 * heads)), (*_HEADS, None))
    q_BTHD, k_BTHD, v_BTHD = (constrain(qkv_BTHX[:, :, :, i], _HEADS) for i in range(3))
    x_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=True)
    return constrain(x_BTHD, _HEADS).reshape(B, T, X // 3)


def _row_keys(key: jax.Array | None, dropout: float, rows: int) -> jax.Array | None:
    return None if key is None or dropout == 0 else row_keys(key, rows)


def _drop(x_BTC: jax.Array, rate: float, keys_B: jax.Array | None, call: int) -> jax.Array:
    """x with the share `rate` of its entries zero and the others scaled up; `call` tells the uses of one key apart."""
    if keys_B is None:
        return x_BTC

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, call), 1 - rate, x_BTC.shape[1:])

    return jnp.where(jax.vmap(keep)(keys_B), x_BTC / (1 - rate), 0).astype(x_BTC.dtype)


def _tokens(batch: PyTree, seq: int) -> jax.Array:
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f'gpt: the batch must be a dict with "tokens" of shape [rows, positions + 1], got {got}')
    tokens = batch["tokens"]
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f'gpt: batch["tokens"] must be integers [rows, positions + 1], got {tokens.dtype}{tokens.shape}'
        )
    if not 2 <= tokens.shape[1] <= seq + 1:
        raise ValueError(
            f'gpt: batch["tokens"] has {tokens.shape[1]} columns, but must have 2 to {seq + 1} (positions + 1); '
            f"cut the rows or build the model with seq={max(tokens.shape[1] - 1, 1)}"
        )
    return tokens


def _weights(batch: PyTree, shape: tuple[int, ...]) -> jax.Array:
    weights = batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape not in (shape, shape[:1]):
        raise ValueError(f'gpt: batch["weights"] must have the shape {shape} or {shape[:1]}, got {weights.shape}')
    return jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (2 - weights.ndim)), shape).astype(jnp.float32)
