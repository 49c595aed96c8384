"""An exponential moving average of the parameters, kept as optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.types import PyTree


class AveragedState(NamedTuple):
    """The average of the parameters, and the state of `tx`."""

    average: PyTree
    inner: Any


def averaged(tx: optax.GradientTransformation, decay: float | jax.Array) -> optax.GradientTransformationExtraArgs:
    """`tx` with a moving average of the parameters in its state.

    After each step, average = decay * average + (1 - decay) * params.
    The average starts at the initial parameters. It has their shapes; that of a bf16 or f16 parameter is kept in f32,
    where small steps are not rounded away, and integers are followed, not averaged. `averaged_params(opt_state)`
    finds it. Put this outermost but for wrappers such as `master(averaged(tx, ...))`, which then averages the f32
    originals: it has to see the final updates. Extra arguments are passed on. No collectives. ValueError for a decay
    outside [0, 1], or without `params`.
    """
    if not isinstance(decay, jax.Array) and not 0 <= decay <= 1:
        raise ValueError(f"averaged: decay must lie between 0 and 1, got {decay}; 0.999 averages about 1000 steps")
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> AveragedState:
        return AveragedState(jax.tree.map(lambda p: jnp.array(p, _dtype(p)), params), tx.init(params))

    def update_fn(
        updates: PyTree, state: AveragedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, AveragedState]:
        if params is None:
            raise ValueError("averaged: update needs the parameters; call tx.update(grads, state, params)")
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        moved = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: _blend(old, new, decay), state.average, moved)
        return updates, AveragedState(average, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged_params(opt_state: PyTree) -> PyTree:
    """The averaged parameters inside an optimizer state, however deep.

    The tree of the parameters that `averaged` saw, with f32 arrays for bf16 and f16. ValueError if there is none or
    more than one.
    """
    found = _averages(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"averaged_params: expected one average in the optimizer state, found {len(found)}; "
            "wrap the whole optimizer once: js.optim.averaged(tx, decay=0.999)"
        )
    return found[0].average


def _averages(opt_state: PyTree) -> list[AveragedState]:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, AveragedState))
    outer = [node for node in nodes if isinstance(node, AveragedState)]
    return outer + [node for state in outer for node in _averages(state.inner)]


def _dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype


def _blend(old: jax.Array, new: jax.Array, decay: float | jax.Array) -> jax.Array:
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return new
    # In this form the average of equal numbers is that number, whatever the rounding.
    return old + (1 - decay) * (new.astype(old.dtype) - old)
