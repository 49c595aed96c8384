"""Decoder-only language models as `js.Stacked` models: their batch, loss and logits.

A batch is {"tokens": int32[B, T + 1]}, for example for B = 1 and T = 3

    tokens    [[ 5, 1, 7, 2 ]]      the model reads 5 1 7
    targets   [[    1, 7, 2 ]]      and predicts 1 7 2

or {"tokens": int32[B, T], "targets": int32[B, T]}, with separate inputs and labels. Optional arrays of a batch:

    weights        loss weights, float[B, T] for each prediction or float[B] for each row; 1 by default
    positions      int32[B, T], the position of a token; 0 to T - 1 by default
    segment_ids    int32[B, T], the document of a token: documents packed in a row don't attend to each other

Rows may have any length T from 1 to the model's `seq`. The last label of a packed document is the next document's
first token: give this label the weight 0. A model with learned positions also needs "positions" that begin at 0 in
every document; rotary positions are relative and don't.

Shape suffixes: B rows, T positions, C width, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import PyTree
from jaxshard.layers.head_loss import head_loss
from jaxshard.layers.positions import count_in_row
from jaxshard.models.quantize import rounded_weights

_Arguments = ParamSpec("_Arguments")
_Model = TypeVar("_Model", bound="Decoder")


class Rows(NamedTuple):
    """The arrays about the rows of a batch that every block reads, in addition to the activations.

    Attributes:
      positions: the position of each token, int32[B, T]; None for 0 to T - 1.
      segment_ids: the document of each token, int32[B, T]; None for one document per row.
      block: the index of the current block, int32[B], equal for all B rows; None for a model whose blocks differ only
        in their parameters.
    """

    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None
    block: jax.Array | None = None

    def after_block(self) -> Rows:
        """Return the `Rows` for the next block: the same arrays, with `block` one larger."""
        return self if self.block is None else self._replace(block=self.block + 1)


class InRows(NamedTuple):
    """Activations together with the `Rows` (positions, documents, block index) that the next block also needs.

    Attributes:
      x: the activations, such as f32[B, T, C].
      rows: the arrays about the rows of the batch.
    """

    x: PyTree
    rows: Rows


def split_rows(activations: PyTree) -> tuple[PyTree, Rows]:
    """Split the input of a block into (activations x, `Rows`); if the input is x alone, the `Rows` are empty."""
    return (activations.x, activations.rows) if isinstance(activations, InRows) else (activations, Rows())


def join_rows(x: PyTree, rows: Rows) -> PyTree:
    """Make the input of a block from activations x and `Rows`; return x alone if `rows` has no arrays."""
    return InRows(x, rows) if jax.tree.leaves(rows) else x


def remember_arguments(make: Callable[_Arguments, _Model]) -> Callable[_Arguments, _Model]:
    """Decorate a function that builds models, so that each model remembers how it was built.

    The model gets two attributes: `make`, the decorated function, and `arguments`, a dict of its arguments with
    defaults.
    """
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def build(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Model:
        model = make(*args, **kwargs)
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        model.make, model.arguments = build, dict(bound.arguments)
        return model

    return build


class Decoder(Stacked):
    """A `js.Stacked` model that predicts the next token of every position.

    The loss is a `js.Mean` of nats per token, in f32. In evaluation, without a random key, there is also the metric
    "accuracy", the fraction of tokens that the model ranked first.

    Shapes: B rows, T positions, C the width of the residual stream, V token ids.

    Args:
      family: the name with which error messages begin, such as "gpt".
      seq: the largest number of positions in a row.
      embed: `embed(params, tokens[B, T], rows, key) -> x[B, T, C]`, where `rows` are `Rows`.
      block: `block(block_params, x[B, T, C], rows, key) -> x[B, T, C]`.
      norm: `norm(params, x[B, T, C]) -> x[B, T, C]`, applied between the last block and the output matrix.
      output: `output(params)` returns the output matrix [C, V], or if `tied` the embedding table [V, C].
      tied: True if the output matrix is the embedding table.
      num_blocks: the number of blocks.
      init: `init(key) -> {"embed": ..., "block": ..., "head": ...}`, as in `js.Stacked`.
      numbered: pass every block its index, as `rows.block`.
      soft_cap: logits x become soft_cap * tanh(x / soft_cap); None leaves them unchanged.

    Attributes:
      make: the function of `js.models` that built the model; None for a model that no such function built.
      arguments: the arguments of `make`, defaults included.
      config: the configuration that `js.hf.model` read; None for other models.
    """

    make: Callable[..., Decoder] | None = None
    arguments: dict[str, Any] = {}  # noqa: RUF012
    config: Any = None

    def __init__(
        self,
        family: str,
        seq: int,
        embed: Callable[[PyTree, jax.Array, Rows, jax.Array | None], jax.Array],
        block: Callable[[PyTree, jax.Array, Rows, jax.Array | None], jax.Array],
        norm: Callable[[PyTree, jax.Array], jax.Array],
        output: Callable[[PyTree], jax.Array],
        tied: bool,
        num_blocks: int,
        init: Callable[[jax.Array], PyTree],
        numbered: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        def embed_batch(params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
            tokens_BT = _check_tokens(family, batch, seq)
            rows = _rows_of(family, batch, tokens_BT.shape)
            if numbered:
                rows = rows._replace(block=jnp.zeros(len(tokens_BT), jnp.int32))
            x = embed(params, tokens_BT, rows, key)
            return join_rows(x, rows)

        def run_block(params: PyTree, x: PyTree, key: jax.Array | None) -> PyTree:
            x_BTC, rows = split_rows(x)
            return join_rows(block(params, x_BTC, rows, key), rows.after_block())

        def head(params: PyTree, x: PyTree, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
            x_BTC, _ = split_rows(x)
            targets_BT = batch["targets"] if "targets" in batch else batch["tokens"][:, 1:]
            weights = _token_weights(family, batch, targets_BT.shape)
            matrix = output(params)
            return head_loss(
                norm(params, x_BTC), matrix, targets_BT, weights, tied=tied, soft_cap=soft_cap, accuracy=key is None
            )

        def readout(params: PyTree, x_BTC: jax.Array) -> jax.Array:
            matrix = output(params)
            logits_BTV = norm(params, x_BTC) @ (matrix.T if tied else matrix)
            return logits_BTV if soft_cap is None else soft_cap * jnp.tanh(logits_BTV / soft_cap)

        super().__init__(embed_batch, run_block, head, num_blocks, init)
        self.seq, self.readout = seq, readout

    def residual(self, activations: PyTree) -> jax.Array:
        """Return the residual stream x[B, T, C] from the activations that one block passes to the next.

        `readout(params, x)` computes the logits from it.
        """
        return split_rows(activations)[0]  # type: ignore[no-any-return]

    def separate_labels(self, batch: PyTree) -> PyTree:
        """Split "tokens" [B, T + 1] of a batch into inputs "tokens" [B, T] and labels "targets" [B, T].

        A batch that already has "targets" is returned unchanged.
        """
        if not isinstance(batch, Mapping) or "tokens" not in batch or "targets" in batch:
            return batch
        tokens = batch["tokens"]
        return {**batch, "tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    @functools.cached_property
    def rounded_weights(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The weights that `quant` rounds to 8 bits: {path: (8-bit dtype, dimensions that products contract)}."""
        return rounded_weights(self.init_parts, self.arguments.get("quant"))

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer for this model: `tx`, unless a subclass gives some parameters an update of their own."""
        return tx


def logits(model: Decoder, params: PyTree, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
    """Compute the logits of the token after each position, in f32, without dropout.

    Args:
      model: a model of `js.models`, such as `js.models.gpt(...)`.
      params: the model's parameters in model order, such as `js.logical(run, layout).params`.
      tokens: rows of at most `model.seq` tokens.

    Returns:
      The logits; those at position t predict token t + 1 from the tokens 0 to t.

    Example:
        logits = js.models.logits(model, params, tokens)    # f32[batch, seq, vocab]
    """
    rest = {name: part for name, part in params.items() if name != BLOCKS}
    # embed takes a training row, whose last token is only a target.
    x_BTC = model.embed(rest, {"tokens": jnp.pad(tokens, ((0, 0), (0, 1)))}, None)
    x_BTC, _ = jax.lax.scan(lambda x, block: (model.block(block, x, None), None), x_BTC, params[BLOCKS])
    return model.readout(rest, model.residual(x_BTC)).astype(jnp.float32)


def _check_tokens(family: str, batch: PyTree, seq: int) -> jax.Array:
    """Return the input tokens [B, T] of a batch; raise ValueError if they are missing or of a wrong dtype or shape."""
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f'{family}: the batch must be a dict with "tokens" of shape [rows, positions + 1], got {got}')
    tokens: jax.Array = batch["tokens"]
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f'{family}: batch["tokens"] must be integers [rows, positions + 1], got {tokens.dtype}{tokens.shape}'
        )
    if "targets" in batch:
        targets, count = batch["targets"], count_in_row(tokens.shape[1])
        if targets.shape != tokens.shape or not jnp.issubdtype(targets.dtype, jnp.integer):
            raise ValueError(
                f'{family}: batch["targets"] must be integers of the shape {list(tokens.shape)} of batch["tokens"], '
                f"got {targets.dtype}{list(targets.shape)}"
            )
        if not 1 <= count <= seq:
            raise ValueError(
                f"{family}: rows have {count} tokens beside their targets, but must have 1 to {seq}; cut the rows or "
                f"build the model with seq={max(count, 1)}"
            )
        return tokens
    if not 2 <= tokens.shape[1] <= seq + 1:
        raise ValueError(
            f'{family}: batch["tokens"] has {tokens.shape[1]} columns, but must have 2 to {seq + 1} (positions + 1); '
            f"cut the rows or build the model with seq={max(tokens.shape[1] - 1, 1)}"
        )
    return tokens[:, :-1]


def _rows_of(family: str, batch: PyTree, shape: tuple[int, ...]) -> Rows:
    """Return "positions" and "segment_ids" of a batch as `Rows`; raise ValueError for a wrong dtype or shape."""
    rows = Rows(batch.get("positions"), batch.get("segment_ids"))
    for name, x in rows._asdict().items():
        if x is not None and (x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(
                f'{family}: batch["{name}"] must be integers of the shape {list(shape)}, one for each token that the '
                f"model reads, got {x.dtype}{list(x.shape)}"
            )
    return rows


def _token_weights(family: str, batch: PyTree, shape: tuple[int, ...]) -> jax.Array | None:
    """Return the loss weight of every prediction, f32[B, T]; a weight per row [B] counts for all its positions.

    None if the batch has no "weights".
    """
    weights: jax.Array | None = batch.get("weights")
    if weights is None:
        return None
    if weights.shape not in (shape, shape[:1]):
        raise ValueError(f'{family}: batch["weights"] must have the shape {shape} or {shape[:1]}, got {weights.shape}')
    if weights.ndim == 1:
        weights = weights[:, None]
    return jnp.broadcast_to(weights, shape).astype(jnp.float32)
