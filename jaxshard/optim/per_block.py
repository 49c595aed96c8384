"""Map an optimizer over the blocks of a model with stacked parameters.

Models stack the parameters of their blocks to scan over the blocks. An optimizer that takes the norm of an array then
takes the norm of all blocks together. `proof/stacking.py` detects such optimizers, and `per_block` corrects them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from jaxshard.core.primitives import draws_random_bits
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import BLOCKS, map_with_path, path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.elementwise import coupled_leaves
from jaxshard.optim.proof.marked import has_marks
from jaxshard.optim.proof.report import describe
from jaxshard.optim.stochastic import StochasticState


class PerBlockState(NamedTuple):
    """The state of `js.optim.per_block`.

    Both attributes are states for the tree of all parameters, so that the path of a state array ends with the path of
    its parameter. `optax.MaskedNode` replaces the parameters that belong to the other attribute.

    Attributes:
      blocks: The state of the wrapped transform for the stacked parameters. Every array has a leading dimension of
        blocks, also the counts of steps.
      others: The state of the wrapped transform for all other parameters.

    Example:
        state = js.optim.per_block(optax.lamb(1e-3)).init(params)
        state.blocks        # the state of each block, stacked
    """

    blocks: Any
    others: Any


def per_block(tx: optax.GradientTransformation, stacked: str = BLOCKS) -> optax.GradientTransformationExtraArgs:
    """Map an optimizer over the blocks of a stacked model, as if the model were not stacked.

    `tx` is mapped by `jax.vmap` over the leading dimension of the stacked parameters, and updates all other parameters
    directly. For transforms that combine elements of an array (LAMB, Muon, Adafactor, block-wise clipping) the updates
    are those of the same model with its blocks in a list; for elementwise transforms nothing changes. Masks and labels
    of `tx` see the shapes of one block. Extra arguments are passed to every block unchanged. It adds no collectives.

    Args:
      tx: The transform for one block.
      stacked: The top-level key of the stacked parameters, which have shape [blocks, ...].

    Returns:
      A transform with a `PerBlockState`.

    Raises (from init):
      ValueError: Nothing under `stacked`; leading dimensions that differ; a transform that couples parameters, such
        as clipping by the global norm (put it before: `optax.chain(clip, per_block(tx))`), or that draws random
        numbers, which would be the same in every block (put `js.optim.stochastic_round` around it).

    Example:
        # params: {"embed": [V, D], "blocks": {"w": [24, D, F]}}. The trust ratio of LAMB is one number per block.
        tx = optax.chain(optax.clip_by_global_norm(1.0), js.optim.per_block(optax.lamb(1e-3)))
    """
    tx = as_transform(tx)

    def keep(tree: PyTree, *, blocks: bool) -> PyTree:
        """Keep the stacked parameters (blocks=True) or all others (False); put `optax.MaskedNode` for the rest."""
        return map_with_path(lambda path, x: x if (_key(path) == stacked) == blocks else optax.MaskedNode(), tree)

    def init_fn(params: PyTree) -> Any:
        if has_marks(params):
            return optax.EmptyState()
        _check(tx, params, stacked)
        return PerBlockState(jax.vmap(tx.init)(keep(params, blocks=True)), tx.init(keep(params, blocks=False)))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        if has_marks(updates):  # `stacking_changes` reads this trace: per_block makes any `tx` independent of stacking
            return updates, state

        def one_block(grads: PyTree, inner: Any, params: PyTree | None) -> Any:
            return tx.update(grads, inner, params, **extra_args)

        of_blocks, of_others = (None if params is None else keep(params, blocks=blocks) for blocks in (True, False))
        blocks, blocks_state = jax.vmap(one_block)(keep(updates, blocks=True), state.blocks, of_blocks)
        others, others_state = tx.update(keep(updates, blocks=False), state.others, of_others, **extra_args)
        merged = map_with_path(
            lambda path, _, block, other: block if _key(path) == stacked else other, updates, blocks, others
        )
        return merged, PerBlockState(blocks_state, others_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _key(path: tuple[Any, ...]) -> str:
    return path_str(path[:1])


def _check(tx: optax.GradientTransformationExtraArgs, params: PyTree, stacked: str) -> None:
    named = jax.tree_util.tree_leaves_with_path(params)
    leaves = [(path_str(path), x) for path, x in named if _key(path) == stacked]
    if not leaves:
        keys = sorted({_key(path) for path, _ in named})
        raise ValueError(
            f"per_block: no parameter under the key {stacked!r}, only {keys}; name the key of the stacked parameters, "
            f"as in per_block(tx, {keys[0]!r}), or use tx as it is"
            if keys
            else "per_block: there are no parameters"
        )
    count = next((x.shape[0] for _, x in leaves if x.ndim), 0)
    raise_all(
        (f"{path}: {list(x.shape)}" for path, x in leaves if x.shape[:1] != (count,)),
        ValueError,
        f"per_block: under {stacked!r} arrays must be stacked, {count} along dim 0 as {leaves[0][0]}; unlike these",
    )

    def one_block(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if _key(path) == stacked else x.shape, x.dtype)

    # Two blocks, since a single array can't show whether the transform couples arrays.
    probe = map_with_path(one_block, params)
    probe = [probe, probe] if len(jax.tree.leaves(probe)) == 1 else probe
    coupled = coupled_leaves(tx, probe)
    if coupled:
        raise ValueError(
            "per_block: tx couples parameters, so a block by itself would not get its update of the whole model: "
            f"{describe(coupled)}. Put that part in front: "
            "optax.chain(optax.clip_by_global_norm(1.0), js.optim.per_block(tx))"
        )
    state = jax.eval_shape(tx.init, probe)
    if any(map(_is_rounded, jax.tree.leaves(state, is_leaf=_is_rounded))):
        raise ValueError(
            "per_block: stochastic_round inside it would round every block by the same random bits; put it around: "
            "js.optim.stochastic_round(js.optim.per_block(tx))"
        )
    if draws_random_bits(jax.make_jaxpr(tx.update)(probe, state, probe)):
        raise ValueError(
            "per_block: tx draws random numbers, which would be the same in every block; put it before per_block"
        )


def _is_rounded(node: Any) -> bool:
    return isinstance(node, StochasticState)
