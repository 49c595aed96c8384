"""`js.Stacked`: a model of identical blocks that every engine can run.

An engine that gathers one block at a time calls `Stacked.run` with a function `fetch`, which gathers a block's
parameters inside the scan over blocks. A pipelined engine calls `embed`, `block` and `head` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.offer import run_as_offered
from jaxshard.adapt.remat import BLOCK_IN, RematPolicy, name_tree
from jaxshard.core.keys import advance
from jaxshard.core.known_model import KnownModel
from jaxshard.core.loss import Loss, Max, Mean, Sum, as_loss
from jaxshard.core.tree import BLOCKS, abstract, check_same_tree
from jaxshard.core.types import PyTree


class Stacked(KnownModel):
    """A model of identical blocks: an embedding, `num_blocks` blocks in sequence, and a head.

    `model.init` and `model.loss` are the pair that `js.layout`, `js.init` and `js.make_step` take. The parameters are
    {"embed", "blocks", "head"}. The parameters of the blocks are stacked, [num_blocks, ...], and the blocks run in a
    `jax.lax.scan`, so that an engine can gather one block's parameters at a time.

    `embed` and `head` both receive all parameters outside of the blocks, {"embed", "head"}, so that a head can share
    the embedding's parameters. Every call has its own random key. In evaluation the key is None: draw no random numbers
    then.

    Under `js.auto()` and on one device the functions see the global batch [batch, ...], under `js.explicit()` and
    `js.pipelined()` the rows of one device and micro-batch. The model itself issues no collectives.

    Args:
      embed: `embed(params, batch, key) -> x`. The activations `x` are any tree of arrays.
      block: `block(block_params, x, key) -> x`, with the structure, shapes and dtypes of its argument `x`.
      head: `head(params, x, batch, key) -> js.Mean | js.Loss`.
      num_blocks: the number of blocks, 1 or more.
      init: `init(key) -> {"embed": ..., "block": the parameters of one block, "head": ...}`.

    Attributes:
      remat: the default of the engines' argument `remat`: what activations a block saves for its backward pass. None
        leaves the default to the engine.

    Raises:
      ValueError: `num_blocks` is less than 1. Later: `init` returns no "block", or a block returns another tree than it
        receives.

    Example:
      A residual network of width 16; see `js.models` for transformers made this way.

          def init(key):
              return {"embed": jnp.eye(8, 16), "block": 0.1 * jax.random.normal(key, (16, 16)), "head": jnp.eye(16, 3)}

          def head(params, x, batch, key):
              return js.Mean(jnp.square(x @ params["head"] - batch["y"]).sum(), batch["y"].size)

          model = js.Stacked(
              embed=lambda params, batch, key: batch["x"] @ params["embed"],
              block=lambda w, x, key: x + jnp.tanh(x @ w),
              head=head,
              num_blocks=12,
              init=init,
          )
          layout = js.layout(js.fsdp(), mesh, model.init, tx)
          step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    """

    remat: RematPolicy | None = None

    @property
    def rounded_weights(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The weights that the model rounds to 8 bits: {path: (8-bit dtype, dimensions that products contract)}."""
        return {}

    def __init__(
        self,
        embed: Callable[..., PyTree],
        block: Callable[..., PyTree],
        head: Callable[..., Mean | Loss],
        num_blocks: int,
        init: Callable[[jax.Array], PyTree],
    ):
        if num_blocks < 1:
            raise ValueError(f"Stacked: num_blocks must be at least 1, got {num_blocks}")
        self.embed, self.block, self.head = embed, block, head
        self.num_blocks = num_blocks
        self.init_parts = init

    def make_params(self, key: jax.Array) -> PyTree:
        """Make the parameters {"embed", "blocks", "head"}; every leaf of "blocks" is stacked [num_blocks, ...]."""
        parts_key, blocks_key = jax.random.split(key)
        parts = self.init_parts(parts_key)
        if not isinstance(parts, dict) or "block" not in parts or BLOCKS in parts:
            got = sorted(parts) if isinstance(parts, dict) else type(parts).__name__
            raise ValueError(f'Stacked: init must return a dict with "block" and without "{BLOCKS}", got {got}')
        rest = {name: part for name, part in parts.items() if name != "block"}
        keys = jax.random.split(blocks_key, self.num_blocks)
        return rest | {BLOCKS: jax.vmap(lambda k: self.init_parts(k)["block"])(keys)}

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple of names of its dimensions: ("blocks", None, None) for stacked matrices.

        Parameters outside of the blocks have only None.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, x: tuple(BLOCKS if path[0].key == BLOCKS and dim == 0 else None for dim in range(x.ndim)),
            params,
        )

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        """Run the model on the batch and return the head's output.

        If a user's own loss calls this function, an engine may run the model on stored shards instead of the gathered
        weights in `model` (see `offer.py`).
        """
        output: Mean | Loss = run_as_offered(self, model, batch, key, lambda: self.run(model, batch, key))
        return output

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Return the loss, under the name "loss", and the head's metrics, computed without random keys."""
        return evaluation(self.compute_loss(model, batch, None))

    def named_block(self, weights: PyTree, x: PyTree, key: jax.Array | None) -> PyTree:
        """Run one block with the given parameters; its input gets the name "block_in" for `jax.checkpoint` policies."""
        return self.block(weights, name_tree(x, BLOCK_IN), key)

    def run(
        self,
        params: PyTree,
        batch: PyTree,
        key: jax.Array | None,
        *,
        fetch: Callable[[PyTree], PyTree] = lambda block: block,
        remat: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda body: body,
        row: jax.Array | int = 0,
    ) -> Mean | Loss:
        """Run the model; make each block's parameters by `fetch` inside the scan over blocks.

        Args:
          params: {"embed", "blocks", "head"}; "blocks" is any tree of arrays [num_blocks, ...], such as shards.
          batch: the batch: a device's own rows under `js.explicit`, else the global batch.
          key: the random key of the step; None in evaluation.
          fetch: makes the parameters of a block from its slice of `params["blocks"]`, for example by all-gathers.
          remat: wraps the body of the scan, for example in `jax.checkpoint`.
          row: the global index of the batch's first row, for `js.row_keys`.

        Returns:
          The head's output.
        """
        rest = {name: part for name, part in params.items() if name != BLOCKS}

        def key_of(call: jax.Array | int) -> jax.Array | None:
            return None if key is None else advance(jax.random.fold_in(key, call), row)

        @remat
        def body(x: PyTree, layer: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            number, stored = layer
            y = self.named_block(fetch(stored), x, key_of(number))
            check_block(x, y)
            return y, None

        x = self.embed(rest, batch, key_of(0))
        x, _ = jax.lax.scan(body, x, (jnp.arange(1, self.num_blocks + 1), params[BLOCKS]))
        output: Mean | Loss = self.head(rest, x, batch, key_of(self.num_blocks + 1))
        return output


def check_block(x: PyTree, y: PyTree) -> None:
    """Raise a ValueError unless a block's output `y` has the tree, shapes and dtypes of its input `x`.

    The message names every leaf that differs.
    """
    check_same_tree(abstract(x), abstract(y), "block must return what it receives", "keep shapes and dtypes")


def evaluation(output: Any) -> dict[str, Mean | Sum | Max]:
    """Return the metrics in a loss function's output: the loss itself, as "loss", and the metrics of a `js.Loss`."""
    loss = as_loss(output)
    value = loss.value if isinstance(loss.value, Mean) else Mean(loss.value, 1.0)
    return {"loss": value} | loss.metrics
