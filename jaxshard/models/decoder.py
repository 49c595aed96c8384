"""What decoder-only language models share: batches, loss, sampling, and how a ready-made size is described.

The batch is {"tokens": int32[B, T + 1]} and optionally {"weights": float[B, T] or float[B]}: position t predicts token
t + 1, and a prediction counts with its weight (without weights: one). Any T up to the model's `seq` will do.

Shape suffixes: B rows, T positions, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxshard.adapt.stacked import BLOCKS, Stacked
from jaxshard.core.constrain import constrain
from jaxshard.core.cross_entropy import cross_entropy
from jaxshard.core.keys import row_keys
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.types import PyTree

STDDEV = 0.02
"""Of the normal distribution from which weights are drawn."""

RESIDUAL = ("batch", "sequence", None)
"""Activations between blocks: split along the sequence where a rule says so."""

WHOLE = ("batch", None, None)

HEADS = ("batch", None, "heads", None)


class Decoder(Stacked):
    """A `Stacked` model that predicts tokens, made of what its family adds; `logits` and `sample` take it.

    Args:
      name: of the family, for errors.
      seq: the longest row, in positions.
      embed: `embed(params, tokens[B, T], key) -> x[B, T, C]`.
      block: as `Stacked` takes it.
      readout: `readout(params, x[B, T, C]) -> logits[B, T, V]`.
      num_blocks: as `Stacked` takes it.
      init: as `Stacked` takes it.

    The loss is a `js.Mean` of nats per token; in evaluation (no key) there is an "accuracy" beside it.
    """

    def __init__(
        self, name: str, seq: int, embed: Callable, block: Callable, readout: Callable, num_blocks: int, init: Callable
    ):
        def embed_batch(params: PyTree, batch: PyTree, key: jax.Array | None) -> jax.Array:
            return embed(params, _tokens(name, batch, seq)[:, :-1], key)

        def head(params: PyTree, x_BTC: jax.Array, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
            logits_BTV = readout(params, x_BTC).astype(jnp.float32)
            targets_BT = batch["tokens"][:, 1:]
            weights_BT = _weights(name, batch, targets_BT.shape)
            nats_BT = cross_entropy(logits_BTV, targets_BT)
            weight = weights_BT.sum()
            loss = Mean((nats_BT * weights_BT).sum(), weight)
            if key is not None:
                return loss
            hits_BT = targets_BT == logits_BTV.argmax(axis=-1)
            return Loss(loss, metrics={"accuracy": Mean((hits_BT * weights_BT).sum(), weight)})

        super().__init__(embed_batch, block, head, num_blocks, init)
        self.seq, self.readout = seq, readout


class Recipe(NamedTuple):
    """How a size is trained when nothing else is said: global rows per step, steps, and the numbers of `adamw`."""

    batch: int
    steps: int
    learning_rate: float
    warmup: int
    b2: float = 0.95
    weight_decay: float = 0.1

    def optimizer(self, steps: int | None = None) -> optax.GradientTransformation:
        """AdamW with a linear warm-up, then a cosine down to a twentieth at `steps` steps (the recipe's by default).

        The warm-up does not depend on `steps`: runs that are meant to be of different length begin alike.
        Elementwise: it runs on whatever shards the parameters are stored in.
        """
        steps = self.steps if steps is None else steps
        warmup, peak = self.warmup, self.learning_rate
        end = max(steps, warmup + 1)
        rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, end, peak / 20)
        return optax.adamw(rate, b2=self.b2, weight_decay=self.weight_decay)


class Size(NamedTuple):
    """A ready-made model: the arguments of the function that makes it, a recipe to train it, and that function."""

    shape: dict[str, int]
    recipe: Recipe
    make: Callable[..., Decoder]

    def model(self, **changes: int) -> Decoder:
        """The model, some of its arguments replaced."""
        return self.make(**self.shape | changes)


def logits(model: Decoder, params: PyTree, tokens: jax.Array) -> jax.Array:
    """logits[B, T, V] in f32 for tokens[B, T]: position t predicts token t + 1. Nothing is dropped."""
    rest = {name: part for name, part in params.items() if name != BLOCKS}
    # embed takes a training row, whose last token is only a target.
    x_BTC = model.embed(rest, {"tokens": jnp.pad(tokens, ((0, 0), (0, 1)))}, None)
    x_BTC, _ = jax.lax.scan(lambda x, block: (model.block(block, x, None), None), x_BTC, params[BLOCKS])
    return model.readout(rest, x_BTC).astype(jnp.float32)


def sample(
    model: Decoder, params: PyTree, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float = 1.0
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
    window = model.seq
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


def apply(module: nn.Module, params: PyTree, *args: Any) -> Any:
    """What a module without state computes."""
    return module.apply({"params": params}, *args)


class Output(nn.Module):
    """The final norm, and logits[B, T, vocab] when there is a vocabulary (an untied output matrix)."""

    vocab: int | None
    norm: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BTC = enter(self.norm()(x_BTC))
        if self.vocab is None:
            return x_BTC
        init = nn.initializers.normal(STDDEV)
        return nn.Dense(self.vocab, use_bias=False, kernel_init=init, name="lm_head")(x_BTC)


def init_parts(embedding: nn.Module, block: nn.Module, output: nn.Module, width: int) -> Callable[[jax.Array], PyTree]:
    """`init(key) -> {"embed", "block", "head"}`, the parameters of the three, as `Stacked` takes it."""

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 3)
        x_BTC = jnp.zeros((1, 1, width))
        return {
            "embed": embedding.init(keys[0], jnp.zeros((1, 1), jnp.int32))["params"],
            "block": block.init(keys[1], x_BTC)["params"],
            "head": output.init(keys[2], x_BTC)["params"],
        }

    return init


def enter(x_BTC: jax.Array) -> jax.Array:
    """What enters column-parallel layers: whole rows; the gradient is scattered again."""
    return constrain(x_BTC, WHOLE, grad=RESIDUAL)


def check_sizes(name: str, sizes: dict[str, int]) -> None:
    """Raises unless all sizes are at least 1."""
    if wrong := {key: size for key, size in sizes.items() if size < 1}:
        raise ValueError(f"{name}: sizes must be at least 1, got {wrong}")


def _tokens(name: str, batch: PyTree, seq: int) -> jax.Array:
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f'{name}: the batch must be a dict with "tokens" of shape [rows, positions + 1], got {got}')
    tokens = batch["tokens"]
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f'{name}: batch["tokens"] must be integers [rows, positions + 1], got {tokens.dtype}{tokens.shape}'
        )
    if not 2 <= tokens.shape[1] <= seq + 1:
        raise ValueError(
            f'{name}: batch["tokens"] has {tokens.shape[1]} columns, but must have 2 to {seq + 1} (positions + 1); '
            f"cut the rows or build the model with seq={max(tokens.shape[1] - 1, 1)}"
        )
    return tokens


def _weights(name: str, batch: PyTree, shape: tuple[int, ...]) -> jax.Array:
    weights = batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape not in (shape, shape[:1]):
        raise ValueError(f'{name}: batch["weights"] must have the shape {shape} or {shape[:1]}, got {weights.shape}')
    return jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (2 - weights.ndim)), shape).astype(jnp.float32)
