"""Compile the two programs of generation: prefill runs on the prompts, each call of decode appends a token to each row.

Shape suffixes: B rows, T positions of a prompt, S positions that a row may have in all.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement, whole
from jaxshard.core.tree import BLOCKS, check_same_tree, leaf_of, same_structure
from jaxshard.core.types import PyTree
from jaxshard.engines.auto import auto, make_move
from jaxshard.engines.just_in_time import why_not_by_block, without_blocks
from jaxshard.generation.cached_model import CachedModel, Caches, Readout
from jaxshard.generation.sampling import Sampling, draw
from jaxshard.reshard.transfer import transfer_array
from jaxshard.training.placing import put_stored


class State(NamedTuple):
    """The arrays that each decode step updates.

    Attributes:
      caches: keys and values of all tokens but the last of each row, on which the model has not run yet.
      tokens: int32[B, S], the prompts and the sampled tokens.
      lengths: int32[B], the number of tokens in each row.
      stopped: bool[B], True for rows that have ended with a stop sequence.
    """

    caches: Caches
    tokens: jax.Array
    lengths: jax.Array
    stopped: jax.Array


class Draw(NamedTuple):
    """The arrays that control sampling; they stay the same for all decode steps.

    Attributes:
      key: a random key.
      rows: uint32[B], the index of each row among all prompts.
      prompts: int32[B], the number of tokens in the prompt of each row.
      stop: int32[sequences, W], the token sequences that end a row, each padded in front with -1.
      how: temperature, top_k and top_p as arrays, from `Sampling.arrays`.
    """

    key: Any
    rows: Any
    prompts: Any
    stop: Any
    how: Sampling


class Programs:
    """The jitted functions `prefill` and `decode` of a model under a layout, compiled once per shape.

    Weights that are only stored sharded (`js.fsdp`) are all-gathered one block at a time; weights that `js.tensor` and
    `js.expert` split stay split. The blocks of a pipeline can't be gathered one at a time. For a pipeline the method
    `weights` gathers all blocks once, so that every device has all blocks.

    Args:
      model: any `js.Stacked` whose attention is `js.attention`.
      layout: the layout of the model's parameters.
      readout: see `CachedModel`.
    """

    def __init__(self, model: Stacked, layout: Layout, readout: Readout | None) -> None:
        self.model, self.layout = CachedModel(model, layout, readout), layout
        make = make_move(layout, auto())
        self._by_block = not why_not_by_block(layout)

        def gather(placements: PyTree, stored: PyTree) -> PyTree:
            return jax.tree.map(lambda placement, x: make(placement, None).gather(x), placements, stored)

        self._gather = gather
        self._tails = jax.tree.map(lambda p: p.drop_first(), layout.params[BLOCKS]) if self._by_block else None
        self._gather_all = jax.jit(partial(self._gather, layout.params))
        self.prefill = jax.jit(self._prefill, static_argnames="size")
        self.decode = jax.jit(self._decode, donate_argnums=1)
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        self.replicate = jax.jit(lambda arrays: arrays, out_shardings=everywhere)

    def weights(self, params: PyTree) -> PyTree:
        """Convert parameters to the weights that `prefill` and `decode` take.

        The parameters may be in a TrainState, as the layout stores them, or in model order, as `model.init` returns
        them. If they are sharded over other devices, they are moved. The weights are sharded as the layout stores them;
        in a pipeline they are gathered.

        Raises:
          ValueError: parameters whose shape or dtype differs from the layout; the message names each.
        """

        def expect(placement: Placement, shape: Any, x: Any) -> Any:
            is_stored = isinstance(x, jax.Array) and x.shape == placement.view.stored
            return jax.ShapeDtypeStruct(placement.view.stored, shape.dtype) if is_stored else shape

        def place(placement: Placement, x: Any) -> jax.Array:
            is_stored = isinstance(x, jax.Array) and x.shape == placement.view.stored
            if is_stored and x.sharding.is_equivalent_to(placement.sharding(self.layout.mesh), x.ndim):
                stored: jax.Array = x
                return stored
            if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):  # of another layout
                view = placement.view if is_stored else whole(leaf_of((), x)).view
                return transfer_array(x, view, placement, self.layout.mesh)
            return put_stored(x, placement, self.layout)

        layout = self.layout
        fix = (
            "give run.params, or what model.init returns; if another layout pads them or has them in pipeline order, "
            "js.transfer(run.params, that_layout, layout)"
        )
        expected = layout.shapes.params
        if same_structure(expected, params):
            expected = jax.tree.map(expect, layout.params, expected, params)
        check_same_tree(expected, params, "generate: the parameters do not fit the layout", fix)
        stored = jax.tree.map(place, layout.params, params)
        return stored if self._by_block else self._gather_all(stored)

    def _fetch(self, stored: PyTree) -> PyTree:
        return stored if self._tails is None else self._gather(self._tails, stored)

    def _rest(self, weights: PyTree) -> PyTree:
        rest = without_blocks(weights)
        return self._gather(without_blocks(self.layout.params), rest) if self._by_block else rest

    def _prefill(self, weights: PyTree, tokens_BT: jax.Array, given: Draw, *, size: int) -> tuple[State, jax.Array]:
        """Run the model on the prompts and append the first new token to each.

        Args:
          weights: the weights, from the method `weights`.
          tokens_BT: the prompts, each padded at its end.
          given: the arrays that control sampling.
          size: the number of positions of the cache.

        Returns:
          (the state for `decode`, bool[] whether all rows have stopped).
        """
        (B, T), model, lengths_B = tokens_BT.shape, self.model, given.prompts
        rest = self._rest(weights)
        tokens_BT = model.hold_rows(tokens_BT)
        empty = model.empty(B, size)
        x, caches = model.run(rest, weights[BLOCKS], self._fetch, tokens_BT, None, empty)
        logits_BV = model.last_logits(rest, x, lengths_B - 1)
        tokens_BS = jnp.pad(tokens_BT, ((0, 0), (0, size - T))) if size > T else tokens_BT[:, :size]
        state = State(caches, tokens_BS, lengths_B, jnp.zeros(B, bool))
        return self._append(state, logits_BV, given)

    def _decode(self, weights: PyTree, state: State, given: Draw) -> tuple[State, jax.Array]:
        """Run the model on the last token of each row and append the next token.

        Returns:
          (the state for the next call, bool[] whether all rows have stopped).
        """
        model, rest, last_B = self.model, self._rest(weights), state.lengths - 1
        tokens_B1 = jnp.take_along_axis(state.tokens, last_B[:, None], axis=1)
        x, caches = model.run(rest, weights[BLOCKS], self._fetch, tokens_B1, last_B, state.caches)
        logits_BV = model.last_logits(rest, x, jnp.zeros_like(last_B))
        return self._append(state._replace(caches=caches), logits_BV, given)

    def _append(self, state: State, logits_BV: jax.Array, given: Draw) -> tuple[State, jax.Array]:
        """Sample a token from the logits and append it to each row that has not stopped.

        Returns:
          (the new state, bool[] whether all rows have stopped).
        """
        drawn_B = draw(logits_BV, given.key, given.rows, state.lengths, given.how)
        here_BS = (jnp.arange(state.tokens.shape[1]) == state.lengths[:, None]) & ~state.stopped[:, None]
        tokens_BS = jnp.where(here_BS, drawn_B[:, None], state.tokens)
        lengths_B = state.lengths + ~state.stopped
        stopped_B = state.stopped | ends_with(tokens_BS, given.prompts, lengths_B, given.stop).any(-1)
        rows = map(self.model.hold_rows, (tokens_BS, lengths_B, stopped_B))
        everywhere = NamedSharding(self.layout.mesh, PartitionSpec())
        return State(state.caches, *rows), jax.lax.with_sharding_constraint(stopped_B.all(), everywhere)


def ends_with(tokens_BS: jax.Array, prompts_B: jax.Array, lengths_B: jax.Array, stop_NW: jax.Array) -> jax.Array:
    """Return bool[B, N]: True where the new tokens of row b end with stop sequence n; tokens of prompts don't count."""
    at_BW = lengths_B[:, None] - jnp.arange(stop_NW.shape[1], 0, -1)
    last_BW = jnp.take_along_axis(tokens_BS, jnp.maximum(at_BW, 0), axis=1)
    last_BW = jnp.where(at_BW >= prompts_B[:, None], last_BW, -2)  # -2 matches no token: tokens of prompts do not count
    return ((last_BW[:, None] == stop_NW) | (stop_NW < 0)).all(-1)
