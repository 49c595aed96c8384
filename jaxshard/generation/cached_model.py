"""Run a `js.Stacked` model on the newest positions of each row, with a KV cache for the earlier positions.

Shape suffixes: B rows, T new positions, S slots of the cache, C width, V vocabulary, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.positionwise.prove import find_mixing
from jaxshard.adapt.stacked import Stacked, check_block
from jaxshard.core.cache import Cache, Slots, Stored
from jaxshard.core.jaxpr import all_equations, equations_inside
from jaxshard.core.layout import Layout
from jaxshard.core.loss import Mean
from jaxshard.core.marks import MARK, show_marks
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import PyTree
from jaxshard.engines.just_in_time import users_code, without_blocks

Readout = Callable[[PyTree, Any], jax.Array]


class Caches(NamedTuple):
    """The KV cache of a model: keys and values for each `js.attention` call in the embedding and in the blocks.

    Attributes:
      embed: an entry for each call in the embedding; most models have none.
      blocks: an entry for each call in the block; its arrays are stacked over the blocks.
    """

    embed: tuple[Stored, ...]
    blocks: tuple[Stored, ...]


class CachedModel:
    """A `js.Stacked` that runs with a KV cache. The constructor traces the model and checks that it can.

    Args:
      model: any `js.Stacked` whose attention is `js.attention`.
      layout: the layout of the model's parameters.
      readout: `readout(params, x) -> logits[B, T, V]` from the output of the last block; None to use the method
        `readout` of the model.

    Attributes:
      vocab: the number of logits per position.
      shares_positions: True if the model calls `js.positions`, which returns the same positions for all rows.

    Raises:
      ValueError: no readout, a block without `js.attention`, or an operation other than `js.attention` by which a
        position depends on another position; the message names the operation.
    """

    def __init__(self, model: Stacked, layout: Layout, readout: Readout | None) -> None:
        if not isinstance(model, Stacked):
            raise TypeError(
                f"generate: the model must be a js.Stacked, such as js.models.make(...), got {type(model).__name__}"
            )
        own: Readout | None = getattr(model, "readout", None)
        if readout is None and own is None:
            raise ValueError(
                "generate: this js.Stacked model has a head that computes a loss, and nothing that computes logits; "
                "pass readout=lambda params, x: ..., which makes logits [rows, positions, vocabulary] from the output "
                "of its last block"
            )
        # A ready-made model passes more than the residual stream between blocks; its readout takes that part only.
        self._residual = getattr(model, "residual", None) if readout is None else None
        chosen = readout or own
        assert chosen is not None
        self.model, self.layout, self.readout = model, layout, chosen
        self.shares_positions = False
        self._embed, self._blocks = self._find_calls()
        self.vocab = self._check_logits()
        self._check_mixing()

    def run(
        self,
        rest: PyTree,
        blocks: PyTree,
        fetch: Callable[[PyTree], PyTree],
        tokens_BT: jax.Array,
        starts_B: jax.Array | None,
        caches: Caches,
    ) -> tuple[PyTree, Caches]:
        """Run the embedding and the blocks on T new positions of each row.

        Args:
          rest: the gathered weights outside of the blocks.
          blocks: the stored weights of the blocks, stacked.
          fetch: gathers the weights of one block; it is called with that block's slice of `blocks`.
          tokens_BT: the tokens at the new positions.
          starts_B: the index of the first new position of each row; None if it is 0 in all rows (prefill).
          caches: the keys and values of the earlier positions; from `empty` if there are none yet.

        Returns:
          (the output of the last block, the caches with the keys and values of the new positions too).
        """
        model, T = self.model, tokens_BT.shape[1]
        # `js.attention` writes into these references, so the user's block need not pass the cache on.
        references = jax.tree.map(jax.new_ref, caches)
        with users_code(self.layout, "the model"):
            with Cache(T, references.embed, starts_B).in_force():
                x = model.embed(rest, make_batch(tokens_BT, starts_B), None)

            def body(x: PyTree, layer: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
                number, block = layer
                weights = fetch(block)
                with Cache(T, references.blocks, starts_B, number).in_force():
                    y = model.block(weights, x, None)
                check_block(x, y)
                return y, None

            x, _ = jax.lax.scan(body, x, (jnp.arange(model.num_blocks), blocks))
        embed, stored = jax.tree.map(lambda x: x[...], references)
        return x, Caches(self.hold(embed, self._embed), self.hold(stored, self._blocks))

    def last_logits(self, rest: PyTree, x: PyTree, last_B: jax.Array) -> jax.Array:
        """Compute the logits at one position of each row, f32[B, V], replicated along V.

        Args:
          rest: the gathered weights outside of the blocks.
          x: the output of the last block.
          last_B: the index of that position in each row of `x`.
        """

        def take(x_BT: jax.Array) -> jax.Array:
            index = last_B.reshape(-1, *(1,) * (x_BT.ndim - 1))
            return jnp.take_along_axis(x_BT, index, axis=1)

        cache = Cache(1, None)
        with users_code(self.layout, "readout"), cache.in_force():
            x = x if self._residual is None else self._residual(x)
            if isinstance(x, jax.Array):
                logits_BV = self.readout(rest, take(x))[:, 0]
            else:  # a tree of the user's, whose position dimensions are unknown: compute all logits
                logits_BV = take(self.readout(rest, x))[:, 0]
        if cache.found:
            raise ValueError("generate: readout calls js.attention; only the blocks and the embedding have a cache")
        return self.hold_rows(logits_BV.astype(jnp.float32))

    def empty(self, rows: int, size: int) -> Caches:
        """Make sharded caches of zeros for `rows` rows of `size` positions."""

        def zeros(calls: list[Slots], blocks: int) -> tuple[Stored, ...]:
            shapes = tuple(call.shapes(blocks, rows, size) for call in calls)
            return self.hold(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), calls)

        return Caches(zeros(self._embed, 1), zeros(self._blocks, self.model.num_blocks))

    def hold(self, stored: tuple[Stored, ...], calls: list[Slots]) -> tuple[Stored, ...]:
        """Constrain cache arrays to the shardings that `js.attention` uses; `calls` has one entry for each call."""
        return tuple(
            jax.tree.map(lambda x, spec=call.spec: self._constrain(x, spec), one)
            for one, call in zip(stored, calls, strict=True)
        )

    def hold_rows(self, x: jax.Array) -> jax.Array:
        """Constrain an array [B, ...] to be split over the batch axes along B and replicated otherwise."""
        return self._constrain(x, PartitionSpec(self.layout.batch_axes or None, *(None,) * (x.ndim - 1)))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        constrained: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh, spec))
        return constrained

    # Checks of the model

    def _find_calls(self) -> tuple[list[Slots], list[Slots]]:
        """Find the `js.attention` calls of the model by tracing its embedding and one block on shapes.

        Also set `shares_positions`.

        Returns:
          (calls in the embedding, calls in the block), each call with the shapes and the sharding of its cache.

        Raises:
          ValueError: the block has no such call, or a call is inside a loop.
        """
        outer, inner = Cache(1, None), Cache(1, None)
        tokens = jax.ShapeDtypeStruct((self.layout.mesh.size, 1), jnp.int32)

        def trace(params: PyTree, tokens: jax.Array) -> PyTree:
            block = jax.tree.map(lambda x: x[0], params[BLOCKS])
            with outer.in_force():
                x = self.model.embed(without_blocks(params), make_batch(tokens, None), None)
            with inner.in_force():
                return self.model.block(block, x, None)

        with users_code(self.layout, "the model"):
            jax.eval_shape(trace, self._shapes(), tokens)
        with show_marks(1):
            program = jax.make_jaxpr(trace)(self._shapes(), tokens)
        if _attends_in_a_loop(program):
            raise ValueError(
                "generate: the model calls js.attention in a loop (jax.lax.scan or while_loop) inside of its block or "
                "embedding, where one call has several caches; write the loop out, or make its body the model's block"
            )
        if not inner.found:
            raise ValueError(
                "generate: the model's block never calls js.attention, so that it would not see the tokens before; "
                "attend by js.attention(q, k, v, causal=True), which reads and writes the cache"
            )
        self.shares_positions = outer.asked_positions or inner.asked_positions
        return outer.found, inner.found

    def _shapes(self) -> PyTree:
        params = self.layout.shapes.params
        if not isinstance(params, dict) or BLOCKS not in params:
            raise ValueError(f'generate: the layout has no "{BLOCKS}": make it with the init method of the same model')
        return params

    def _plain(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Compute the logits of all positions without a cache, [B, T, V]; this is only traced, for checks."""
        rest = without_blocks(params)
        x = self.model.embed(rest, batch, None)
        x, _ = jax.lax.scan(lambda x, block: (self.model.block(block, x, None), None), x, params[BLOCKS])
        return self.readout(rest, x if self._residual is None else self._residual(x))

    def _check_logits(self) -> int:
        batch = make_batch(jax.ShapeDtypeStruct((2, 1), jnp.int32), None)
        made = jax.eval_shape(self._plain, self._shapes(), batch)
        shape = getattr(made, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != (2, 1):
            raise ValueError(
                f"generate: readout must return logits [rows, positions, vocabulary], got "
                f"{type(made).__name__ if shape is None else list(shape)} for 2 rows of 1 position"
            )
        return int(shape[2])

    def _check_mixing(self) -> None:
        """Raise ValueError if an operation other than `js.attention` makes a position depend on another position."""
        T = min(8, getattr(self.model, "seq", 8)) // 2 * 2
        if T == 0:
            return

        def total(params: PyTree, batch: PyTree) -> Mean:
            return Mean(self._plain(params, batch).astype(jnp.float32).sum(), jnp.ones(batch["tokens"].shape).sum())

        params, tokens = self._shapes(), jax.ShapeDtypeStruct((1, T), jnp.int32)
        batch = make_batch(tokens, None)
        dims = [None] * len(jax.tree.leaves(params)) + [1] * len(batch)
        if found := find_mixing(total, (params, batch), dims, 2):
            lines = "\n".join(f"  {finding}" for finding in found)
            raise ValueError(
                "generate: with a cache the model sees one position at a time, which is right if it sees others by "
                f"js.attention alone. It does not:\n{lines}"
            )


def _attends_in_a_loop(program: Any) -> bool:
    loops = (eqn for eqn in all_equations(program) if eqn.primitive.name in ("scan", "while"))
    inside = (eqn for loop in loops for eqn in equations_inside(loop))
    return any(eqn.primitive is MARK and eqn.params["name"] == "js.attention" for eqn in inside)


def make_batch(tokens_BT: Any, starts_B: jax.Array | None) -> dict[str, Any]:
    """Make the batch {"tokens", "targets", "positions"}, int32[B, T] each, for the `embed` function of a model.

    Targets are zeros. Positions of a row count from its entry in `starts_B`, or from 0 if this is None.
    """
    B, T = tokens_BT.shape
    if isinstance(tokens_BT, jax.ShapeDtypeStruct):
        return dict.fromkeys(("tokens", "targets", "positions"), tokens_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if starts_B is not None:
        positions_BT = starts_B[:, None] + positions_BT
    return {"tokens": tokens_BT, "targets": jnp.zeros_like(tokens_BT), "positions": positions_BT}
