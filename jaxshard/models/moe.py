"""Decoders with routed experts as `js.Stacked` models, such as Mixtral, Qwen3-MoE and DeepSeekMoE.

`models/decoder.py` describes the batch, `models/llama.py` everything but the experts. Between blocks the activations
are a tree {"x", "routing"}. Losses of the routing are computed for each row and carried from block to block with the
row's activations, so that they are the same on every mesh, in every engine and for every number of micro-batches.
"routing" has for each row of the batch

    balance, z     f32[B]              losses, summed over the blocks so far and divided by the number of all blocks
    bias           f32[B]              zero, with a gradient that balances experts without a loss
    dropped        f32[B]              number of choices that were dropped for lack of capacity
    load           f32[B, depth, E]    how often each expert was chosen; each block appends its counts at the end

Shape suffixes: B rows, T positions, C width, F an expert's hidden width, E experts, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.constrain import constrain
from jaxshard.core.loss import Loss, Mean, Sum, as_loss
from jaxshard.core.tree import BLOCKS, map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.layers.moe.eight_bits import Rounding
from jaxshard.layers.moe.moe import moe as route
from jaxshard.layers.moe.routing import Routing, Scores
from jaxshard.layers.positions import count_in_row, sum_in_row
from jaxshard.models.decoder import Decoder, join_rows, remember_arguments, split_rows
from jaxshard.models.llama import Attention, gated_mlp, llama
from jaxshard.models.parts import (
    RESIDUAL,
    STDDEV,
    Window,
    apply,
    check_sizes,
    check_window,
    enter_tensor_region,
    residual_stddev,
)
from jaxshard.models.quantize import Quant, expert_rounding, quantize
from jaxshard.models.recipe import Recipe, Size
from jaxshard.models.rope import Scaling, as_scaling

_HIDDEN_DIMS = {"gate_proj": 2, "up_proj": 2, "down_proj": 1}

BIAS = "bias"
"""The name of the router's parameter that balances experts without a loss."""


@remember_arguments
def moe(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    experts: int,
    k: int,
    seq: int,
    shared: int = 0,
    dense: int = 0,
    dense_hidden: int | None = None,
    scores: Scores = "softmax",
    normalize: bool = True,
    capacity: float | None = None,
    balance: float = 0.01,
    z: float = 0.0,
    bias_rate: float = 0.0,
    head_dim: int | None = None,
    rope_base: float = 500_000,
    rope_scaling: Scaling | float | None = None,
    norm_epsilon: float = 1e-5,
    qk_norm: bool = False,
    window: Window = None,
    tied: bool = False,
    quant: Quant = None,
) -> RoutedDecoder:
    """Build a Llama 3 with a mixture of experts in place of the MLP, with `model.init` and `model.loss`.

    A router (a matrix product with [C, E] in f32) scores the experts for every token. The k experts with the best
    scores compute the token, and their outputs are summed, weighted by the scores (`js.moe`). With `js.expert` each
    device holds some of the experts.

    The loss is a `js.Mean` of nats per token; training adds losses of the routing. For a row these are

        balance    the sum over the experts of f * P, where f is E / (k T) times the number of tokens that chose the
                   expert, and P is the expert's share of the scores of all experts, as a mean over the tokens; the sum
                   is 1 if all experts are chosen equally often
        z          the mean over the tokens of the squared log-sum-exp of the router's logits

    each as the mean over the blocks and then over the rows. Metrics: these losses, and "drop_rate", the fraction
    of dropped choices (0 without `capacity`); in evaluation, whose loss has only the nats, also "accuracy".
    `model.routing.evaluate` counts how often each expert of each block is chosen.

    Activations that `remat` policies of engines can name are those of `js.models.llama`, with "moe_hidden", the
    products of the experts with their gate and up matrices, [N, F] each, and "mlp_hidden", the same products of the
    shared experts.

    Args:
      vocab, width, depth, heads, kv_heads, seq: as in `js.models.llama`.
      hidden: the hidden width of one expert.
      experts: the number of experts in a block.
      k: the number of experts that compute each token.
      shared: the number of additional experts, of the same width, that compute every token, with the weight 1.
      dense: the number of first blocks that have a plain MLP instead of experts. These blocks run with the embedding:
        outside of `remat`, with parameters that stay gathered, and in a pipeline on the devices that compute the
        embedding.
      dense_hidden: the hidden width of the MLP in these blocks; by default that of k and the shared experts together.
      scores: the function from the router's logits to scores: "softmax" over all experts, or a "sigmoid" of each.
      normalize: divide the weights of the chosen experts by their sum.
      capacity: the most tokens of a row that an expert accepts, as a multiple of an expert's mean number of tokens;
        None for no limit, which drops no token.
      balance: the factor of the balance loss.
      z: the factor of the z loss.
      bias_rate: balance without a loss: a bias per expert is added to the scores to choose the experts, but not to
        their weights. Every step increases the bias by this rate if the expert was chosen less often than the mean of
        its block, and decreases it otherwise. Train with the optimizer `model.optimizer(tx)`, which does this.
      head_dim, rope_base, rope_scaling, norm_epsilon, qk_norm, window, tied: as in `js.models.llama`.
      quant: "int8" or "fp8" to compute the products of the blocks' weights in 8 bits, those of the experts too, or
        rules of qwix, as in `js.models.llama`; paths of experts are "experts/gate_proj" and the like, and their
        operation is "ragged_dot". The router is never rounded.

    Returns:
      The model, a `js.Stacked` that every engine can run.

    Raises:
      ValueError: a size or factor out of its range, k above the number of experts; what `js.models.llama` refuses.
      TypeError: a size that is not an integer.

    Sources: Jiang et al. 2024, "Mixtral of Experts"; Dai et al. 2024, "DeepSeekMoE", section 3, for shared experts;
    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for both ways to balance (equations 16 to 20); Zoph
    et al. 2022, "ST-MoE", equation 5, for the z loss.

    Example:
        model = js.models.moe(vocab=256, width=64, depth=2, heads=4, kv_heads=2, hidden=64, experts=8, k=2, seq=64)
        layout = js.layout(js.compose(js.fsdp("data"), js.expert()), js.make_mesh(data=2, expert=4), model.init, tx)
    """
    check_sizes("moe", {"hidden": hidden, "experts": experts, "k": k})
    check_sizes("moe", {"shared + 1": shared + 1, "dense + 1": dense + 1, "dense_hidden": dense_hidden or hidden})
    if k > experts:
        raise ValueError(f"moe: every token takes k={k} experts, but there are {experts}; use k from 1 to {experts}")
    if dense >= depth:
        raise ValueError(f"moe: dense={dense} blocks of depth={depth} leave none with experts; use at most {depth - 1}")
    if wrong := {name: x for name, x in (("balance", balance), ("z", z), ("bias_rate", bias_rate)) if x < 0}:
        raise ValueError(f"moe: factors must not be negative, got {wrong}")
    plain = llama(
        vocab=vocab, width=width, depth=depth, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, tied=tied,
        hidden=dense_hidden or hidden * (k + shared), rope_base=rope_base, rope_scaling=rope_scaling,
        norm_epsilon=norm_epsilon, qk_norm=qk_norm, window=window, quant=quant,
    )  # fmt: skip
    attention = Attention(
        heads, kv_heads, head_dim or width // heads, rope_base, as_scaling(rope_scaling), norm_epsilon,
        residual_stddev(depth), qk_norm, window=check_window("moe", window, depth),
    )  # fmt: skip
    router = Router(experts, k, scores, normalize, capacity, balance, z, bias_rate)
    mlps = SharedExperts(hidden * shared, residual_stddev(depth)) if shared else None
    block = RoutedBlock(
        quantize(attention, quant), nn.RMSNorm(epsilon=norm_epsilon), router, hidden,
        None if mlps is None else quantize(mlps, quant), depth - dense,
        {name: expert_rounding(quant, f"experts/{name}") for name in _HIDDEN_DIMS},
    )  # fmt: skip
    return RoutedDecoder(plain, block, dense)


@dataclass(frozen=True)
class Router:
    """The settings of the router of experts, with the names that they have as arguments of `js.models.moe`."""

    experts: int
    k: int
    scores: Scores
    normalize: bool
    capacity: float | None
    balance: float
    z: float
    bias_rate: float

    @property
    def losses(self) -> dict[str, float]:
        """Return {"balance" or "z": the factor of this loss in the training loss}, without losses whose factor is 0."""
        return {name: factor for name, factor in (("balance", self.balance), ("z", self.z)) if factor}

    def start(self, rows: int, depth: int) -> PyTree:
        """Return the routing statistics of each row before the first block: zeros.

        They are the losses "balance" and "z" and the numbers "dropped" and "bias", each f32[rows], and "load",
        f32[rows, depth, experts], where `depth` is the number of blocks with experts. The top of this file explains
        them.
        """
        names = [*self.losses, "dropped", *(["bias"] if self.bias_rate else [])]
        numbers = {name: jnp.zeros(rows, jnp.float32) for name in names}
        return numbers | {"load": jnp.zeros((rows, depth, self.experts), jnp.float32)}

    def add(self, numbers: PyTree, record: Routing, positions: int, bias_E: jax.Array | None) -> PyTree:
        """Add the routing statistics of a block to those of the blocks before it.

        Under `js.context` a device has only some positions of each row. The balance loss and the bias are not linear in
        the counts, so their counts are first summed over the devices that share a row. The other statistics need no
        collective here, because they are summed together with the loss.

        Args:
          numbers: the statistics of the blocks before, as from `start`.
          record: the block's statistics, from `js.moe`.
          positions: the number of positions of each row on this device.
          bias_E: the router's bias, one number per expert; None without `bias_rate`.
        """
        depth = numbers["load"].shape[1]
        load_BE = record.load.astype(jnp.float32)
        all_positions = count_in_row(positions)
        share_BE = sum_in_row(load_BE) / (self.k * all_positions)
        found = {"dropped": record.dropped.astype(jnp.float32)}
        if self.balance:
            probabilities_BE = sum_in_row(record.probabilities) / all_positions
            found["balance"] = (share_BE * probabilities_BE).sum(-1) * (self.experts / depth)
        if self.z:
            found["z"] = record.z / (positions * depth)
        if bias_E is not None:
            # Its value is zero, and its gradient is the excess of an expert's choices over the mean: engines sum it
            # over all rows like any gradient, and the optimizer takes its sign.
            weighted_B = ((share_BE - 1 / self.experts) * bias_E).sum(-1)
            found["bias"] = weighted_B - jax.lax.stop_gradient(weighted_B)
        load_BLE = jnp.concatenate([numbers["load"][:, 1:], load_BE[:, None]], 1)
        return {name: numbers[name] + x for name, x in found.items()} | {"load": load_BLE}


@dataclass(frozen=True)
class RoutedBlock:
    """A transformer block with experts: x += attention(norm(x)), then x += experts(norm(x)), for x[B, T, C].

    Attributes:
      attention: the module that computes x + attention(norm(x)).
      norm: the norm before the router and the experts.
      router: the router's settings.
      hidden: the hidden width of an expert.
      shared: the module of the shared experts, which compute every token; None without shared experts.
      depth: the number of blocks with experts.
      roundings: how the product with each matrix of an expert is rounded to 8 bits; None for not at all.
    """

    attention: Attention
    norm: nn.Module
    router: Router
    hidden: int
    shared: nn.Module | None
    depth: int
    roundings: dict[str, Rounding | None]

    def init(self, key: jax.Array, width: int) -> PyTree:
        """Draw the parameters of a block with `width` features: {"attention", "mlp_norm", "router", "experts", ...}."""
        keys, x_BTC = jax.random.split(key, 6), jnp.zeros((1, 1, width))
        E, C, F = self.router.experts, width, self.hidden
        shapes = {"gate_proj": (E, C, F), "up_proj": (E, C, F), "down_proj": (E, F, C)}
        stddevs = {"gate_proj": STDDEV, "up_proj": STDDEV, "down_proj": self.attention.residual_stddev}
        params = {
            "attention": self.attention.init(keys[0], x_BTC)["params"],
            "mlp_norm": self.norm.init(keys[0], x_BTC)["params"],
            "router": {"kernel": STDDEV * jax.random.normal(keys[1], (C, E))},
            "experts": {
                name: stddevs[name] * jax.random.normal(k, shape) for k, (name, shape) in zip(keys[2:5], shapes.items())
            },
        }
        if self.router.bias_rate:
            params["router"][BIAS] = jnp.zeros(E)
        return params | ({} if self.shared is None else {"shared": self.shared.init(keys[5], x_BTC)["params"]})

    def run(self, params: PyTree, activations: PyTree, key: jax.Array | None) -> PyTree:
        """Apply the block to {"x": activations, "routing": statistics}; return the same tree after the block."""
        router, (x_BTC, rows) = self.router, split_rows(activations["x"])
        x_BTC = apply(self.attention, params["attention"], x_BTC, rows)
        h_BTC = enter_tensor_region(apply(self.norm, params["mlp_norm"], x_BTC))
        logits_BTE = h_BTC.astype(jnp.float32) @ params["router"]["kernel"].astype(jnp.float32)
        bias_E = params["router"].get(BIAS)
        out_BTC, record = route(
            h_BTC, logits_BTE, partial(expert_mlp, roundings=self.roundings), params["experts"], k=router.k,
            scores=router.scores, normalize=router.normalize, bias=bias_E, capacity=router.capacity,
            hidden=_HIDDEN_DIMS,
        )  # fmt: skip
        if self.shared is not None:
            out_BTC += apply(self.shared, params["shared"], h_BTC)
        routing = router.add(activations["routing"], record, x_BTC.shape[1], bias_E)
        x_BTC += constrain(out_BTC, RESIDUAL)
        return {"x": join_rows(x_BTC, rows.after_block()), "routing": routing}


class SharedExperts(nn.Module):
    """The experts that compute every token, as a single gated MLP: x[B, T, C] to [B, T, C]."""

    hidden: int
    residual_stddev: float

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        return gated_mlp(x_BTC, self.hidden, self.residual_stddev)


def expert_mlp(
    params: PyTree, x_NC: jax.Array, dot: Callable[..., jax.Array], *, roundings: Mapping[str, Rounding | None]
) -> jax.Array:
    """Apply the gated MLP of its expert to each token of x[N, C]; `js.moe` calls this as its argument `fn`.

    `dot(x, w)` multiplies each token by the matrix of its own expert, from w[E, C, F].
    """

    def product(x: jax.Array, name: str) -> jax.Array:
        return dot(x, params[name], roundings[name])

    gate_NF, up_NF = (checkpoint_name(product(x_NC, name), "moe_hidden") for name in ("gate_proj", "up_proj"))
    return product(nn.silu(gate_NF) * up_NF, "down_proj")


class RoutedDecoder(Decoder):
    """The model that `js.models.moe` builds: a `Decoder` whose blocks have experts.

    Args:
      plain: a Llama of the same size; the model uses its embedding, head, blocks without experts, and checks of the
        batch.
      block: a block with experts.
      dense: the number of first blocks without experts.

    Attributes:
      router: the router's settings.
      routing: a `js.Stacked` model with the same parameters. Its `evaluate` returns "loss", and "load", a `js.Sum` of
        how often each expert was chosen, [blocks with experts, experts].
    """

    def __init__(self, plain: Decoder, block: RoutedBlock, dense: int) -> None:
        vars(self).update(vars(plain))  # the length of rows, the output, and all other attributes of a decoder
        self.router, depth = block.router, plain.num_blocks - dense

        def init(key: jax.Array) -> PyTree:
            keys = jax.random.split(key, 2 + dense)
            parts = plain.init_parts(keys[0])
            first = {f"dense_{number}": plain.init_parts(k)["block"] for number, k in enumerate(keys[2:])}
            width = jax.tree.leaves(parts["embed"])[0].shape[-1]
            return parts | {"embed": parts["embed"] | first, "block": block.init(keys[1], width)}

        def embed(params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
            x = plain.embed(params, batch, key)
            for number in range(dense):
                x = plain.block(params["embed"][f"dense_{number}"], x, None)
            return {"x": x, "routing": self.router.start(len(batch["tokens"]), depth)}

        def head(params: PyTree, x: PyTree, batch: PyTree, key: jax.Array | None) -> Loss:
            loss = as_loss(plain.head(params, x["x"], batch, key))
            return self._add_routing(loss, x["routing"], split_rows(x["x"])[0].shape[1], training=key is not None)

        def count(params: PyTree, x: PyTree, batch: PyTree, key: jax.Array | None) -> Loss:
            return Loss(
                as_loss(plain.head(params, x["x"], batch, key)).value,
                metrics={"load": Sum(x["routing"]["load"].sum(0))},
            )

        Stacked.__init__(self, embed, block.run, head, depth, init)
        self.routing = Stacked(embed, block.run, count, depth, init)

    def residual(self, activations: PyTree) -> jax.Array:
        """Return the residual stream x[B, T, C] from the tree {"x", "routing"} that one block passes to the next."""
        return super().residual(activations["x"])

    def _add_routing(self, loss: Loss, routing: PyTree, positions: int, *, training: bool) -> Loss:
        rows, depth, _ = routing["load"].shape
        means = {name: Mean(routing[name].sum(), rows) for name in self.router.losses}
        value = loss.value
        if training:
            for name, factor in self.router.losses.items():
                value += factor * means[name]
            if self.router.bias_rate:
                value += Mean(routing["bias"].sum(), rows)
        dropped = Mean(routing["dropped"].sum(), rows * positions * self.router.k * depth)
        return Loss(value, metrics=loss.metrics | means | {"drop_rate": dropped})

    def dim_names(self, params: PyTree) -> PyTree:
        """Return the logical names of each parameter's dimensions, by which `js.tensor` and `js.expert` split it.

        The names are those of `js.Stacked`, but the matrices of the experts have a dimension "expert": for example
        ("blocks", "expert", "embed", "mlp") for [blocks, E, C, F].
        """

        def names(path: Any, x: Any, found: tuple[str | None, ...]) -> tuple[str | None, ...]:
            *_, folder, name = path_str(path).split("/")
            if folder == "experts":
                return (BLOCKS, "expert", *(("mlp", "embed") if name == "down_proj" else ("embed", "mlp")))
            return found

        return map_with_path(names, params, super().dim_names(params))

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return an optimizer that balances the experts: it updates router biases by their own rule, all else by `tx`.

        The gradient of a bias is positive if more tokens chose its expert than the mean of the experts, and negative if
        fewer did. The update moves the bias by `bias_rate` in the opposite direction, whatever the magnitude of the
        gradient. Without `bias_rate` return `tx` itself.
        """
        if not self.router.bias_rate:
            return tx
        move = optax.chain(optax.scale_by_sign(), optax.scale(-self.router.bias_rate))

        def label(params: PyTree) -> PyTree:
            return map_with_path(lambda path, _: "bias" if path_str(path).endswith(BIAS) else "rest", params)

        return optax.partition({"bias": move, "rest": tx}, label)


SIZES = {
    # The active parameters of gpt-1m, and its recipe. On the standard library 1.60 to 1.62 nats per held-out byte
    # (3 seeds; benchmarks/README.md).
    "moe-1m": Size(
        {
            "vocab": 256, "width": 144, "depth": 4, "heads": 8, "kv_heads": 8, "hidden": 192, "experts": 8, "k": 2,
            "seq": 32, "tied": True,
        },
        Recipe(batch=64, steps=320, learning_rate=2.5e-3, warmup=80),
        moe,
        "everything",
    ),
    # Table 1 of Jiang et al. 2024; base of the angles and factor of the balance loss from the published weights'
    # configuration. How it was trained is not said: tokens in a batch, steps and rate are Llama 2's.
    "mixtral-8x7b": Size(
        {
            "vocab": 32_000, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336, "experts": 8,
            "k": 2, "seq": 32_768, "rope_base": 1_000_000, "balance": 0.02,
        },
        Recipe(batch=128, steps=500_000, learning_rate=3e-4, warmup=2000),
        moe,
        "nothing",
    ),
    # Table 2 of Yang et al. 2025, "Qwen3 Technical Report", and the published weights' configuration, with the rows of
    # its pre-training's last stage. Of the recipe only the 36T tokens are said.
    "qwen3-30b-a3b": Size(
        {
            "vocab": 151_936, "width": 2048, "depth": 48, "heads": 32, "kv_heads": 4, "head_dim": 128, "hidden": 768,
            "experts": 128, "k": 8, "seq": 32_768, "rope_base": 1_000_000, "norm_epsilon": 1e-6, "qk_norm": True,
            "balance": 0.001,
        },
        Recipe(batch=256, steps=4_300_000, learning_rate=3e-4, warmup=2000),
        moe,
        "nothing",
    ),
    # Section 5.1.2 of Dai et al. 2024, "DeepSeekMoE" (the 16B: rows of 4096, batches of 4608, 106,449 steps), and the
    # published weights' configuration. Its first block has no experts.
    "deepseek-16b": Size(
        {
            "vocab": 102_400, "width": 2048, "depth": 28, "heads": 16, "kv_heads": 16, "hidden": 1408, "experts": 64,
            "k": 6, "shared": 2, "dense": 1, "dense_hidden": 10_944, "normalize": False, "seq": 4096,
            "rope_base": 10_000, "norm_epsilon": 1e-6, "balance": 0.001,
        },
        Recipe(batch=4608, steps=106_449, learning_rate=4.2e-4, warmup=2000),
        moe,
        "nothing",
    ),
}  # fmt: skip
"""Ready-made sizes of this family; `js.models.SIZES` has those of all families."""
