"""`Stacked`: a model made of identical blocks, described once, run by every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.offer import run_as_offered
from jaxshard.core.keys import advance
from jaxshard.core.known_model import KnownModel
from jaxshard.core.loss import Loss, Max, Mean, Sum, as_loss
from jaxshard.core.tree import BLOCKS, abstract, check_same_tree
from jaxshard.core.types import PyTree

RematPolicy = str | Callable[..., bool]


class Stacked(KnownModel):
    """A model `embed -> block x num_blocks -> head` with the parameters {"embed", "blocks", "head"}.

    `init` and `loss` are the pair that `js.layout`, `js.init` and `js.make_step` take. The blocks' parameters are
    stacked along a new first dimension of size `num_blocks` and the blocks run in a `lax.scan`, so that an engine can
    gather one block's weights at a time.

    Args:
      embed: `embed(params, batch, key) -> x`, any tree of activations.
      block: `block(block_params, x, key) -> x`, the same structure, shapes and dtypes.
      head: `head(params, x, batch, key) -> js.Mean | js.Loss`.
      num_blocks: how many blocks.
      init: `init(key) -> {"embed": ..., "block": one block's parameters, "head": ...}`.

    `embed` and `head` receive the parameters without the blocks, {"embed", "head"}: a tied head finds the embedding
    there. Every call has a key of its own; in evaluation the key is None and nothing is dropped.
    """

    def __init__(self, embed: Callable, block: Callable, head: Callable, num_blocks: int, init: Callable):
        if num_blocks < 1:
            raise ValueError(f"Stacked: num_blocks must be at least 1, got {num_blocks}")
        self.embed, self.block, self.head = embed, block, head
        self.num_blocks = num_blocks
        self._init_parts = init

    def make_params(self, key: jax.Array) -> PyTree:
        """Parameters {"embed", "blocks", "head"}; every leaf of "blocks" is stacked [num_blocks, ...]."""
        parts_key, blocks_key = jax.random.split(key)
        parts = self._init_parts(parts_key)
        if not isinstance(parts, dict) or "block" not in parts or BLOCKS in parts:
            got = sorted(parts) if isinstance(parts, dict) else type(parts).__name__
            raise ValueError(f'Stacked: init must return a dict with "block" and without "{BLOCKS}", got {got}')
        rest = {name: part for name, part in parts.items() if name != "block"}
        keys = jax.random.split(blocks_key, self.num_blocks)
        return rest | {BLOCKS: jax.vmap(lambda k: self._init_parts(k)["block"])(keys)}

    def dim_names(self, params: PyTree) -> PyTree:
        """For every parameter the logical names of its dimensions: how a layout knows which are stacked."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: tuple(BLOCKS if path[0].key == BLOCKS and dim == 0 else None for dim in range(x.ndim)),
            params,
        )

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        """Return the head's output on the whole batch, as one device computes it."""
        output: Mean | Loss = run_as_offered(self, model, batch, key, lambda: self.run(model, batch, key))
        return output

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Return {"loss": js.Mean} and the head's metrics, computed without keys."""
        return evaluation(self.compute_loss(model, batch, None))

    def run(
        self,
        params: PyTree,
        batch: PyTree,
        key: jax.Array | None,
        *,
        fetch: Callable[[PyTree], PyTree] = lambda block: block,
        remat: Callable[[Callable], Callable] = lambda body: body,
        row: jax.Array | int = 0,
    ) -> Mean | Loss:
        """The head's output, each block's weights fetched inside the scan body.

        `params["blocks"]` is any tree with a first dimension of size `num_blocks`; `fetch` makes one block's
        parameters of its slice; `remat` wraps the scan body; `row` is the global number of the batch's first row, for
        `js.row_keys`.
        """
        rest = {name: part for name, part in params.items() if name != BLOCKS}

        def key_of(call: jax.Array | int) -> jax.Array | None:
            return None if key is None else advance(jax.random.fold_in(key, call), row)

        @remat
        def body(x: PyTree, layer: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            number, stored = layer
            y = self.block(fetch(stored), x, key_of(number))
            check_block(x, y)
            return y, None

        x = self.embed(rest, batch, key_of(0))
        x, _ = jax.lax.scan(body, x, (jnp.arange(1, self.num_blocks + 1), params[BLOCKS]))
        return self.head(rest, x, batch, key_of(self.num_blocks + 1))


def check_block(x: PyTree, y: PyTree) -> None:
    """Raises unless a block returns what it receives; names every leaf that differs."""
    check_same_tree(abstract(x), abstract(y), "block must return what it receives", "keep shapes and dtypes")


def evaluation(output: Any) -> dict[str, Mean | Sum | Max]:
    """A loss function's output as evaluation metrics."""
    loss = as_loss(output)
    value = loss.value if isinstance(loss.value, Mean) else Mean(loss.value, 1.0)
    return {"loss": value} | loss.metrics


def checkpoint_body(policy: RematPolicy, body: Callable) -> Callable:
    """`body` under `jax.checkpoint`, never saving what a gather made.

    `policy` names what the forward pass saves: "nothing", "dots", "everything", or a function of
    `jax.checkpoint_policies`. The outputs of gathers, and of the moves and casts that turn what is stored into a
    weight, are never saved: the backward pass gathers again, so that only one block's weights are whole at a time.
    """
    return jax.checkpoint(body, policy=saved(policy), prevent_cse=False)


def saved(policy: RematPolicy) -> Callable[..., Any]:
    """What `jax.checkpoint` saves by a policy, gathers never."""
    saveable = saveable_of(policy)

    def save(prim: Any, *args: Any, **params: Any) -> Any:
        return prim.name not in _MOVES and saveable(prim, *args, **params)

    return save


_MOVES = frozenset(
    {"all_gather", "shard_map", "sharding_constraint", "slice", "reshape", "transpose", "convert_element_type", "pad"}
)

_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


def saveable_of(policy: RematPolicy) -> Callable[..., Any]:
    """The function of a policy; a ValueError for a name that there is not."""
    if callable(policy):
        return policy
    if policy not in _POLICIES:
        raise ValueError(
            f"remat must be one of {', '.join(map(repr, _POLICIES))} or a function of jax.checkpoint_policies, "
            f"got {policy!r}"
        )
    return _POLICIES[policy]
