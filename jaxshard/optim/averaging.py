"""An exponential moving average of the parameters, kept as optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.average import Decay, average_dtype, blend, check_decay
from jaxshard.core.transform import as_transform
from jaxshard.core.types import PyTree


class AveragedState(NamedTuple):
    """The state of `js.optim.averaged`.

    Attributes:
      average: The average, a tree like the parameters, with f32 arrays for bf16 and f16 parameters.
      inner: The state of the wrapped transform.
      count: The number of steps taken, for a decay that is a schedule; else ().

    Example:
        state = js.optim.averaged(optax.adamw(3e-4), 0.999).init(params)
        state.average       # the averages, a tree like the parameters
    """

    average: PyTree
    inner: Any
    count: Any = ()


def averaged(tx: optax.GradientTransformation, decay: Decay | jax.Array) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it also keeps a moving average of the parameters in its state.

    `js.averaged(run, layout)` is another function, for evaluation: it replaces the parameters of a `TrainState` by this
    average.

    After each step (Polyak and Juditsky 1992, with exponential weights)

        average = decay * average + (1 - decay) * params

    The average starts at the initial parameters. With a fixed decay it consists mostly of these during the first
    1 / (1 - decay) steps, 1000 for 0.999, and a short training that evaluates it looks untrained. A decay that grows
    avoids this: `lambda step: jnp.minimum(0.999, (1 + step) / (10 + step))` begins at 0.1 and reaches 0.999 after about
    9000 steps.

    The average has the shapes and the sharding of the parameters. The average of a bf16 or f16 parameter is kept in
    f32, in which small changes are not rounded away; integers are copied, not averaged. Put this wrapper outermost,
    since it must see the final updates; only `js.optim.master` may be around it: `master(averaged(tx, ...))` averages
    the f32 copies. Extra arguments are passed on. No collectives.

    Args:
      tx: The transform to wrap; its updates do not change.
      decay: Between 0 and 1; 0.999 averages about 1000 steps. Or a schedule `decay(step)` as for
        `js.Average`, with steps counted from 0; the state then also has the number of steps.

    Returns:
      A transform with an `AveragedState`; `averaged_params(opt_state)` finds the average.

    Raises:
      ValueError: A decay outside [0, 1]; or `update` is called without `params`.

    Example:
        tx = js.optim.averaged(optax.adamw(3e-4), decay=0.999)
        ...                                                     # train
        metrics = eval_step(js.averaged(run, layout), batch)    # evaluate the average
    """
    check_decay("averaged", decay)
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> AveragedState:
        average = jax.tree.map(lambda p: jnp.array(p, average_dtype(p)), params)
        return AveragedState(average, tx.init(params), jnp.zeros((), jnp.int32) if callable(decay) else ())

    def update_fn(
        updates: PyTree, state: AveragedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, AveragedState]:
        if params is None:
            raise ValueError("averaged: update needs the parameters; call tx.update(grads, state, params)")
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        new_params = optax.apply_updates(params, updates)
        average = blend(state.average, new_params, decay, state.count)
        return updates, AveragedState(average, inner, jax.tree.map(lambda n: n + 1, state.count))

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
