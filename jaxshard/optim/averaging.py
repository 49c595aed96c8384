"""An exponential moving average of the parameters, kept as optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.average import average_dtype, blend
from jaxshard.core.transform import as_transform
from jaxshard.core.types import PyTree


class AveragedState(NamedTuple):
    """The state of `js.optim.averaged`.

    Attributes:
      average: The average, a tree like the parameters, with f32 arrays for bf16 and f16 parameters.
      inner: The state of the wrapped transform.

    Example:
        state = js.optim.averaged(optax.adamw(3e-4), 0.999).init(params)
        state.average       # the averages, a tree like the parameters
    """

    average: PyTree
    inner: Any


def averaged(tx: optax.GradientTransformation, decay: float | jax.Array) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it also keeps a moving average of the parameters in its state.

    `js.averaged(run, layout)` is another function, for evaluation: it replaces the parameters of a `TrainState` by this
    average.

    After each step (Polyak and Juditsky 1992, with exponential weights)

        average = decay * average + (1 - decay) * params

    The average starts at the initial parameters and has the shapes and the sharding of the parameters. The average of a
    bf16 or f16 parameter is kept in f32, in which small changes are not rounded away; integers are copied, not
    averaged. Put this wrapper outermost, since it must see the final updates; only `js.optim.master` may be around it:
    `master(averaged(tx, ...))` averages the f32 copies. Extra arguments are passed on. No collectives.

    Args:
      tx: The transform to wrap; its updates do not change.
      decay: Between 0 and 1; 0.999 averages about 1000 steps.

    Returns:
      A transform with an `AveragedState`; `averaged_params(opt_state)` finds the average.

    Raises:
      ValueError: A decay outside [0, 1]; or `update` is called without `params`.

    Example:
        tx = js.optim.averaged(optax.adamw(3e-4), decay=0.999)
        ...                                                     # train
        metrics = eval_step(js.averaged(run, layout), batch)    # evaluate the average
    """
    if not isinstance(decay, jax.Array) and not 0 <= decay <= 1:
        raise ValueError(f"averaged: decay must lie between 0 and 1, got {decay}; 0.999 averages about 1000 steps")
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> AveragedState:
        return AveragedState(jax.tree.map(lambda p: jnp.array(p, average_dtype(p)), params), tx.init(params))

    def update_fn(
        updates: PyTree, state: AveragedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, AveragedState]:
        if params is None:
            raise ValueError("averaged: update needs the parameters; call tx.update(grads, state, params)")
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        new_params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: blend(old, new, decay), state.average, new_params)
        return updates, AveragedState(average, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged_params(opt_state: PyTree) -> PyTree:
    """Find the averaged parameters in an optimizer state, at any depth.

    Args:
      opt_state: The state of any transform with one `js.optim.averaged` in it.

    Returns:
      A tree like the parameters that `averaged` received, sharded as they are stored, with f32 arrays for bf16 and f16
      parameters.

    Raises:
      ValueError: There is no average in the state, or more than one.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> tx = optax.chain(optax.clip(1.0), averaged(optax.sgd(0.1), decay=0.9))
      >>> averaged_params(tx.init(params))
      {'w': Array([1., 1., 1.], dtype=float32)}
    """
    found = _find_averages(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"averaged_params: expected one average in the optimizer state, found {len(found)}; "
            "wrap the whole optimizer once: js.optim.averaged(tx, decay=0.999)"
        )
    return found[0].average


def _find_averages(opt_state: PyTree) -> list[AveragedState]:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, AveragedState))
    outer = [node for node in nodes if isinstance(node, AveragedState)]
    return outer + [node for state in outer for node in _find_averages(state.inner)]
