"""Models as their users write them, for tensor axes: sizes that 2, 4 and 8 devices divide, losses that are masked.

None of them names a dimension unless it says so: the built-in rules have to know what Flax calls its parameters.
Attention has no biases here: that of the keys has a gradient of exactly zero, of which rounding leaves 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jaxshard as js
from tests.toys import Toy, cross_entropy, gpt_toy, mask

PyTree = Any
ROWS, SEQ, VOCAB, WIDTH, HEADS = 8, 8, 64, 32, 8


def tokens() -> PyTree:
    """Tokens to predict from the ones before, some of them without weight."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:], "weights": mask((ROWS, SEQ))}


def images() -> PyTree:
    """Pictures of 8 x 8 pixels in 8 classes."""
    rng = np.random.default_rng(4)
    pixels = rng.normal(size=(ROWS, 8, 8, 3)).astype(np.float32)
    return {"x": pixels, "y": rng.integers(0, 8, ROWS, dtype=np.int32), "weights": mask((ROWS,))}


def linen_toy_of(module: nn.Module, batch: PyTree, rate: float = 0.1) -> Toy:
    """A Linen module of one argument with parameters alone."""

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch)

    return Toy(lambda key: module.init(key, batch["x"][:1])["params"], loss_fn, batch, rate)


class EncoderBlock(nn.Module):
    """A transformer block of Flax's own parts; dropout where a rate is given."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        seen = nn.make_causal_mask(x[..., 0])
        h = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(nn.LayerNorm()(x), mask=seen)
        x = x + nn.Dropout(self.dropout, deterministic=self.dropout == 0)(h)
        h = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        h = nn.Dense(WIDTH)(nn.gelu(h))
        return x + nn.Dropout(self.dropout, deterministic=self.dropout == 0)(h)


class Encoder(nn.Module):
    """Tokens to logits through two blocks; the output matrix is the embedding's where tied."""

    tied: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH)
        x = table(tokens) + self.param("pos_embedding", nn.initializers.normal(0.02), (SEQ, WIDTH))
        for _ in range(2):
            x = EncoderBlock(self.dropout)(x)
        x = nn.LayerNorm()(x)
        return table.attend(x) if self.tied else nn.Dense(VOCAB)(x)


class LlamaBlock(nn.Module):
    """Grouped-query attention and SwiGLU, dimensions named as MaxText and T5X name them."""

    kv_heads: int

    @nn.compact
    def __call__(self, x):
        def heads(name, count, logical):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", logical, "head_dim"))
            return nn.DenseGeneral((count, WIDTH // HEADS), use_bias=False, kernel_init=init, name=name)

        def dense(name, features, logical):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), logical)
            return nn.Dense(features, use_bias=False, kernel_init=init, name=name)

        h = nn.RMSNorm()(x)
        q = heads("to_q", HEADS, "heads")(h)
        k, v = (heads(name, self.kv_heads, "kv_heads")(h) for name in ("to_k", "to_v"))
        k, v = (js.constrain(x, ("batch", None, "kv_heads", None)) for x in (k, v))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("heads", "head_dim", "embed"))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, kernel_init=init, name="from_heads")(h)
        h = nn.RMSNorm()(x)
        h = nn.silu(dense("gating", 2 * WIDTH, ("embed", "mlp"))(h)) * dense("rising", 2 * WIDTH, ("embed", "mlp"))(h)
        return x + dense("falling", WIDTH, ("mlp", "embed"))(h)


class Llama(nn.Module):
    """Two such blocks between embeddings with names."""

    kv_heads: int = 2

    @nn.compact
    def __call__(self, tokens):
        # A norm divides by what it receives: after embeddings of 0.02 it would amplify rounding fiftyfold.
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        x = nn.Embed(VOCAB, WIDTH, embedding_init=init)(tokens)
        for _ in range(2):
            x = LlamaBlock(self.kv_heads)(x)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "vocab"))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=init)(nn.RMSNorm()(x))


class NnxBlock(nnx.Module):
    """A transformer block of NNX's own parts."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.first = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.second = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.second(nnx.gelu(self.first(self.norm2(x))))


class NnxTransformer(nnx.Module):
    """Tokens to logits through two such blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class ResNet(nn.Module):
    """Two residual blocks of convolutions with BatchNorm; statistics are the model's state."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        for _ in range(2):
            h = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            h = nn.Conv(32, (3, 3), use_bias=False)(h)
            h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
            x = x + nn.Conv(16, (3, 3), use_bias=False)(h)
        return nn.Dense(8)(x.mean((1, 2)))


class Lstm(nn.Module):
    """Tokens to logits through one layer of LSTM cells."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(nn.Embed(VOCAB, WIDTH)(tokens))
        return nn.Dense(VOCAB)(x)


class Experts(nn.Module):
    """An MLP of 8 experts of which every token takes two, weighted; no capacity limit, so rows are independent."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        init = nn.initializers.lecun_normal(batch_axis=0)
        wi = self.param("wi", init, (8, WIDTH, 2 * WIDTH))
        wo = self.param("wo", init, (8, 2 * WIDTH, WIDTH))
        gates = nn.softmax(nn.Dense(8, name="router")(x))
        top, chosen = jax.lax.top_k(gates, 2)
        weights = (jax.nn.one_hot(chosen, 8) * top[..., None]).sum(-2)
        h = nn.gelu(jnp.einsum("btc,ecf->btef", x, wi))
        x = x + jnp.einsum("btef,efc,bte->btc", h, wo, weights)
        return nn.Dense(VOCAB)(x)


@cache
def llama_toy(kv_heads: int = 2) -> Toy:
    """Named by nn.with_logical_partitioning, through the Linen adapter."""
    module = Llama(kv_heads)
    batch = tokens()
    init_fn, loss_fn = js.linen(module, lambda model, batch: cross_entropy(model(batch["x"]), batch), batch)
    return Toy(init_fn, loss_fn, batch, 0.02)


@cache
def nnx_transformer_toy() -> Toy:
    batch = tokens()
    return Toy(*js.nnx(NnxTransformer, lambda model, batch: cross_entropy(model(batch["x"]), batch)), batch, 0.02)


@cache
def resnet_toy() -> Toy:
    module, batch = ResNet(), images()

    def init_fn(key: jax.Array) -> js.Model:
        variables = module.init(key, batch["x"][:1])
        return js.Model(variables["params"], variables["batch_stats"])

    def loss_fn(model: js.Model, batch: PyTree, key: jax.Array) -> js.Loss:
        variables = {"params": model.params, "batch_stats": model.state}
        logits, new = module.apply(variables, batch["x"], mutable=["batch_stats"])
        return js.Loss(cross_entropy(logits, batch), state=new["batch_stats"])

    return Toy(init_fn, loss_fn, batch, 0.01)


@cache
def dropout_toy() -> Toy:
    module, batch = Encoder(dropout=0.2), tokens()

    def init_fn(key: jax.Array) -> PyTree:
        return module.init({"params": key, "dropout": key}, batch["x"][:1])["params"]

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        return cross_entropy(module.apply({"params": params}, batch["x"], rngs={"dropout": key}), batch)

    return Toy(init_fn, loss_fn, batch)


ZOO: dict[str, Callable[[], Toy]] = {
    "gpt": lambda: gpt_toy(vocab=VOCAB, heads=HEADS),
    "llama": llama_toy,
    "linen": cache(lambda: linen_toy_of(Encoder(), tokens())),
    "nnx": nnx_transformer_toy,
    "resnet": resnet_toy,
    "lstm": cache(lambda: linen_toy_of(Lstm(), tokens())),
    "experts": cache(lambda: linen_toy_of(Experts(), tokens())),
    "tied": cache(lambda: linen_toy_of(Encoder(tied=True), tokens())),
    "dropout": dropout_toy,
}
"""Every model by name; only those whose rows are independent, and whose random numbers are `row_keys`, are explicit."""

GLOBAL_VIEW_ONLY = ("resnet", "dropout")
