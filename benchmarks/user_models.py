"""Language models as their users write them, without `js.Stacked`: the table of predicted peaks has to know these too.

Each function returns (init_fn, loss_fn, units): the pair that `js.make_step` takes, and the classes of modules that
gather their own parameters under an engine with `units=`. A batch is {"x": int32[B, T], "y": int32[B, T]}.

Shape suffixes: B rows, T positions, C width, H heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import jaxshard as js

PyTree = Any


class Sizes(NamedTuple):
    """What all of them are made of."""

    width: int
    depth: int
    heads: int
    vocab: int
    seq: int


class Pair(NamedTuple):
    init: Callable[..., Any]
    loss: Callable[..., Any]
    units: tuple[type, ...] = ()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> js.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return js.Mean(losses.sum(), losses.size)


class LinenBlock(nn.Module):
    """A transformer block of Flax's own parts, mask and all."""

    heads: int

    @nn.compact
    def __call__(self, x):
        C = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        x = x + h
        h = nn.Dense(4 * C)(nn.LayerNorm()(x))
        return x + nn.Dense(C)(nn.gelu(h))


class LinenLoop(nn.Module):
    """Blocks in a Python loop, an output matrix of its own."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens):
        s = self.sizes
        x = nn.Embed(s.vocab, s.width)(tokens)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (s.seq, s.width), x.dtype)[: x.shape[1]]
        for _ in range(s.depth):
            x = LinenBlock(s.heads)(x)
        return nn.Dense(s.vocab, use_bias=False)(nn.LayerNorm()(x))


class ScannedBlock(nn.Module):
    """A pre-norm block with a gated MLP, as a body of `nn.scan`; it is checkpointed by its author."""

    heads: int

    @nn.compact
    def __call__(self, x, _):
        C = x.shape[-1]
        h = nn.RMSNorm()(x)
        qkv = nn.DenseGeneral((3, self.heads, C // self.heads), use_bias=False, name="qkv")(h)
        h = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
        x = x + nn.DenseGeneral(C, axis=(-2, -1), use_bias=False, name="out")(h)
        h = nn.RMSNorm()(x)
        h = nn.silu(nn.Dense(3 * C, use_bias=False, name="gate")(h)) * nn.Dense(3 * C, use_bias=False, name="up")(h)
        return x + nn.Dense(C, use_bias=False, name="down")(h), None


class LinenScan(nn.Module):
    """Blocks in `nn.scan` under `nn.remat`; the output matrix is the embedding's."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens):
        s = self.sizes
        table = nn.Embed(s.vocab, s.width)
        stack = nn.scan(
            nn.remat(ScannedBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=s.depth,
        )
        x, _ = stack(s.heads)(table(tokens), None)
        return table.attend(nn.RMSNorm()(x))


class NnxBlock(nnx.Module):
    """A transformer block of NNX's own parts."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        C = sizes.width
        self.norm1, self.norm2 = nnx.LayerNorm(C, rngs=rngs), nnx.LayerNorm(C, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(sizes.heads, C, use_bias=False, decode=False, rngs=rngs)
        self.first, self.second = nnx.Linear(C, 4 * C, rngs=rngs), nnx.Linear(4 * C, C, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.second(nnx.gelu(self.first(self.norm2(x))))


class NnxTransformer(nnx.Module):
    """Tokens to logits through a list of such blocks."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(sizes.vocab, sizes.width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(sizes, rngs) for _ in range(sizes.depth)])
        self.lm_head = nnx.Linear(sizes.width, sizes.vocab, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def linen_loop(sizes: Sizes) -> Pair:
    """Linen through the adapter, blocks in a loop that may be units."""
    example = {"x": jnp.zeros((1, sizes.seq), jnp.int32), "y": jnp.zeros((1, sizes.seq), jnp.int32)}
    pair = js.linen(LinenLoop(sizes), lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]), example)
    return Pair(*pair, (LinenBlock,))


def linen_scan(sizes: Sizes) -> Pair:
    """Linen called by its user, blocks in a scan."""
    module = LinenScan(sizes)

    def init_fn(key: jax.Array) -> PyTree:
        return module.init(key, jnp.zeros((1, sizes.seq), jnp.int32))["params"]

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch["y"])

    return Pair(init_fn, loss_fn)


def nnx_transformer(sizes: Sizes) -> Pair:
    """NNX through the adapter."""
    pair = js.nnx(partial(NnxTransformer, sizes), lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]))
    return Pair(*pair, (NnxBlock,))


def plain(sizes: Sizes) -> Pair:
    """No library: dictionaries of arrays, a scan over stacked blocks, attention by einsum."""
    C, L, H, V = sizes.width, sizes.depth, sizes.heads, sizes.vocab
    D = C // H
    shapes = {
        "table": (V, C), "norm": (C,), "head": (C, V),
        "blocks": {
            "norm1": (L, C), "norm2": (L, C), "wq": (L, C, H, D), "wk": (L, C, H, D), "wv": (L, C, H, D),
            "wo": (L, H, D, C), "w1": (L, C, 4 * C), "w2": (L, 4 * C, C),
        },
    }  # fmt: skip

    def init_fn(key: jax.Array) -> PyTree:
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        return treedef.unflatten([0.02 * jax.random.normal(*pair) for pair in zip(keys, leaves, strict=True)])

    def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def block(x: jax.Array, w: PyTree) -> tuple[jax.Array, None]:
        h = normalize(x, w["norm1"])
        q, k, v = (jnp.einsum("btc,chd->bhtd", h, w[name]) for name in ("wq", "wk", "wv"))
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / D**0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e30)).astype(x.dtype)
        x = x + jnp.einsum("bhts,bhsd,hdc->btc", weights, v, w["wo"])
        h = normalize(x, w["norm2"])
        return x + jax.nn.relu(h @ w["w1"]) ** 2 @ w["w2"], None

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        x = params["table"][batch["x"]]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
        return cross_entropy(normalize(x, params["norm"]) @ params["head"], batch["y"])

    return Pair(init_fn, loss_fn)


def odd(sizes: Sizes) -> Pair:
    """No transformer: gated linear recurrences by an associative scan, a convolution over time, a tied table.

    Its sizes are odd (a vocabulary that nothing divides is padded where it is stored), half of the blocks share their
    weights, and the loss is taken of every second position alone.
    """
    C, L, V = sizes.width, sizes.depth, sizes.vocab

    def init_fn(key: jax.Array) -> PyTree:
        names = {"table": (V, C), "shared": (C, C)}
        blocks = [{"gate": (C, 2 * C), "inner": (C, 2 * C), "conv": (4, 2 * C), "out": (2 * C, C)} for _ in range(L)]
        leaves, treedef = jax.tree.flatten(names | {"layers": blocks}, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        return treedef.unflatten([0.02 * jax.random.normal(*pair) for pair in zip(keys, leaves, strict=True)])

    def combine(first: PyTree, second: PyTree) -> PyTree:
        return first[0] * second[0], first[1] * second[0] + second[1]

    def block(x: jax.Array, w: PyTree, shared: jax.Array) -> jax.Array:
        h = x / (1e-6 + jnp.sqrt((x * x).mean(-1, keepdims=True)))
        inner = h @ w["inner"]
        padded = jnp.pad(inner, ((0, 0), (3, 0), (0, 0)))
        inner = sum(padded[:, i : i + inner.shape[1]] * w["conv"][i] for i in range(4))
        decay = jax.nn.sigmoid(h @ w["gate"])
        _, states = jax.lax.associative_scan(combine, (decay, (1 - decay) * inner), axis=1)
        return x + (jax.nn.silu(states) @ w["out"]) @ shared

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        x = params["table"][batch["x"]]
        for w in params["layers"]:
            x = block(x, w, params["shared"])
        logits = x[:, ::2] @ params["table"].T
        return cross_entropy(logits, batch["y"][:, ::2])

    return Pair(init_fn, loss_fn)


MODELS: dict[str, Callable[[Sizes], Pair]] = {
    "linen-loop": linen_loop,
    "linen-scan": linen_scan,
    "nnx": nnx_transformer,
    "plain": plain,
    "odd": odd,
}

SIZES = {
    "125m": Sizes(768, 12, 12, 50257, 1024),
    "350m": Sizes(1024, 12, 16, 32000, 1024),
    "1b": Sizes(2048, 8, 16, 32000, 2048),
    "wide": Sizes(4096, 4, 32, 32000, 2048),
}
