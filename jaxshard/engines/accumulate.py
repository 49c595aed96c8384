"""Accumulate the gradient of a loss over micro-batches, equal to the gradient of the batch at once.

A loss is a weighted mean: a total over a weight, both summed over all rows of all devices. With micro-batches of
unequal weight (padding, masked tokens) the mean of their means is wrong. So there are two passes:

    1. weight = sum over devices and micro-batches of weight_i      (dead code elimination leaves only the weights)
    2. grads  = sum over micro-batches of grad(total_i / weight)

With the weight known first, each micro-batch differentiates its exact share of the global mean, and its gradient can be
reduced and added at once. Dividing the summed gradient at the end would work for one weight, but a loss may be a sum of
means with different weights (`ce + 0.01 * aux`), whose gradients are already added by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.model_state import next_state
from jaxshard.core.loss import Loss, Max, Mean, Sum, sum_dtype, weighted_sum
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import Outcome
from jaxshard.engines.joint import Weights, joint_in_force
from jaxshard.engines.part import Cut, Part
from jaxshard.engines.row_axes import taking_turns
from jaxshard.engines.state_rules import StateRules

LossOf = Callable[[PyTree, PyTree, PyTree, PyTree, Any], Loss]
"""`loss_of(sinks, params, state, batch, row)`: the loss of a part of the batch whose first row has index `row`."""

Read = Callable[[Part], StateRules]
"""`read(part)`: check the trace of a part of the batch; return the rules that combine the model states of all parts."""


def accumulate(
    loss_of: LossOf,
    sinks: PyTree,
    params: PyTree,
    state: PyTree,
    cut: Cut,
    sum_over_devices: Callable[[Any], Any],
    read: Read | None,
) -> tuple[Outcome, PyTree, StateRules | None]:
    """Compute the loss of a batch and its gradient, one micro-batch after another.

    With several micro-batches the loss is traced twice. The first pass computes only the weights of the loss, whose sum
    over all micro-batches must be known before the second pass can compute gradients.

    Args:
      loss_of: computes the loss of some rows of the batch; see `LossOf`.
      sinks: zeros, one array per parameter with the shape of its gradient. The loss is differentiated with respect to
        them, because a gradient may have another shape than its stored parameter (see `just_in_time.py`).
      params: the stored parameters.
      state: the model's state, such as the statistics of BatchNorm.
      cut: the batch, cut into micro-batches.
      sum_over_devices: sums a scalar over the devices that hold other rows of the batch; called once for each weight of
        the loss.
      read: receives the traced loss of one micro-batch, checks it, and returns the rules that combine the model states
        of all micro-batches and devices; None if the loss sees the global batch at once.

    Returns:
      (outcome, gradients, rules). `outcome` has the loss, metrics and state of this device's rows; the caller combines
      them over devices. `gradients` have the shapes of `sinks`. `rules` is the result of `read`, or None. With rules,
      `outcome.state` is a list of arrays that the rules must still combine; without, it is the model's new state.

    Raises:
      Unsuited: several micro-batches of a loss that is no `js.Mean`.
    """
    if len(cut.first_rows) > 1:
        assert read is not None, "no micro-batch is the whole batch"
        with taking_turns():
            return _accumulate_in_scan(loss_of, sinks, params, state, cut, sum_over_devices, read)

    def differentiate(*args: Any) -> tuple[Loss, jax.Array, PyTree]:
        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, *args)
            weights = jax.tree.map(sum_over_devices, _weights(loss))
            return _share_of_mean(loss, _of_all_replicas(weights)), loss

        (value, loss), grads = jax.value_and_grad(objective, has_aux=True)(sinks)
        return loss, value, grads

    args = params, state, *cut.first()
    if read is None:
        loss, value, grads = differentiate(*args)
        return Outcome(value, loss.metrics, next_state(state, loss)), grads, None
    part = Part.trace(differentiate, *args)
    states = read(part)
    loss, value, grads = part.run()
    return Outcome(value, loss.metrics, states.parts(loss)), grads, states


def _accumulate_in_scan(
    loss_of: LossOf,
    sinks: PyTree,
    params: PyTree,
    state: PyTree,
    cut: Cut,
    sum_over_devices: Callable[[Any], Any],
    read: Read,
) -> tuple[Outcome, PyTree, StateRules]:
    """Scan over the micro-batches twice: to sum the weights of the loss, then to add gradients; see `accumulate`."""

    def only_loss(*args: Any) -> tuple[Loss]:
        loss = loss_of(sinks, *args)
        if not isinstance(loss.value, Mean):
            raise Unsuited(
                f"{len(cut.first_rows)} micro-batches need a loss that says its weight: return js.Mean(total, weight) "
                "instead of a scalar, so that micro-batches of unequal weight are averaged exactly"
            )
        return (loss,)

    part = Part.trace(only_loss, params, state, *cut.first())
    states, turns = read(part), (cut.turns, cut.first_rows)
    # Weights do not depend on parameters, so dead code elimination removes most of the loss.
    weights_of = part.program.only(part.loss.value.weights)

    def weigh(weights: Weights, turn: tuple[PyTree, jax.Array]) -> tuple[Weights, None]:
        rows, row = turn
        return jax.tree.map(jnp.add, weights, tuple(weights_of(params, state, cut.part(rows), row))), None

    zeros = tuple(jnp.zeros(weight.aval.shape, weight.aval.dtype) for weight in part.loss.value.weights)
    weights, _ = jax.lax.scan(weigh, zeros, turns)
    weights = _of_all_replicas(jax.tree.map(sum_over_devices, weights))

    def add(carry: tuple[PyTree, list[jax.Array]], turn: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
        grads, combined = carry
        rows, row = turn

        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, params, state, cut.part(rows), row)
            return _share_of_mean(loss, weights), loss

        (value, loss), new = jax.value_and_grad(objective, has_aux=True)(sinks)
        return (jax.tree.map(jnp.add, grads, new), states.add(combined, states.parts(loss))), (value, loss.metrics)

    # The sinks are zeros, so the sum of the gradients starts from them.
    (grads, combined), (values, metrics) = jax.lax.scan(add, (sinks, states.start()), turns)
    metrics = {name: _combine_stacked(metric) for name, metric in metrics.items()}
    return Outcome(values.sum(), metrics, combined), grads, states


def _weights(loss: Loss) -> Weights:
    return jax.lax.stop_gradient(loss.value.weights) if isinstance(loss.value, Mean) else ()


def _of_all_replicas(weights: Weights) -> Weights:
    joint = joint_in_force()
    return weights if joint is None else joint.weigh(weights)


def _share_of_mean(loss: Loss, weights: Weights) -> jax.Array:
    return weighted_sum(loss.value, weights) if isinstance(loss.value, Mean) else loss.value


def _combine_stacked(metric: Mean | Sum | Max) -> Mean | Sum | Max:
    """Combine a metric stacked over micro-batches, [micro-batches, ...], by a sum or maximum along that dimension."""
    if isinstance(metric, Max):
        return Max(metric.value.max(0))
    combined: Mean | Sum = jax.tree.map(lambda x: x.sum(0, dtype=sum_dtype(x.dtype)), metric)
    return combined
