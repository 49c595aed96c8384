"""The gradient of a loss over micro-batches, equal to that of the whole batch at once.

A loss is a weighted mean: a total over a weight, both summed over all rows of all devices. With micro-batches of
unequal weight (padding, masked tokens) the mean of their means is another number. So two passes are made:

    1. weight = sum over devices and turns of the weight of turn i      (the compiler drops all but the weights)
    2. grads  = sum over turns of grad(total_i / weight)

With the weight known first, each turn differentiates its exact share of the global mean, and its gradient can be
reduced and added at once. Dividing the summed gradient afterwards would do for one weight, but a loss may be a sum of
means with a weight each (`ce + 0.01 * aux`), whose gradients are no longer apart by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.compat import without_callbacks
from jaxshard.core.jaxpr import Program, eliminate_dead_code, open_jaxpr
from jaxshard.core.loss import Loss, Max, Mean, Sum, sum_dtype, weighted_sum
from jaxshard.core.model_state import next_state
from jaxshard.core.row_axes import taking_turns
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import Outcome
from jaxshard.engines.joint import Weights, joint_in_force
from jaxshard.engines.state_rules import StateRules

LossOf = Callable[[PyTree, PyTree, Any], Loss]
"""`loss_of(sinks, rows, row)`: the loss of some rows, `row` the global number of the first."""


def accumulate(
    loss_of: LossOf,
    sinks: PyTree,
    turns: PyTree,
    first_rows: jax.Array,
    sum_over_devices: Callable[[Any], Any],
    state: PyTree,
    states: StateRules | None,
) -> tuple[Outcome, PyTree]:
    """Compute the loss over all micro-batches, and its gradient with respect to the sinks.

    Args:
      loss_of: the loss of some rows.
      sinks: zeros in the shape of the gradients (see `just_in_time`).
      turns: the batch, every array [micro-batches, rows, ...].
      first_rows: [micro-batches], the global number of each one's first row.
      sum_over_devices: sums a scalar over the devices that hold other rows; one all-reduce for each weight of the loss.
      state: the model's state, as the loss receives it.
      states: how the states that parts of the batch return are combined; None where the loss sees all of it.

    Returns:
      The outcome on this device's rows, whose value and metrics the caller combines over devices, and the gradients,
      shaped like `sinks`. Its state is the new one, or with `states` the parts that they combine.

    Raises:
      Unsuited: several turns of a loss that is no `js.Mean`.
    """
    if first_rows.shape[0] == 1:
        rows = jax.tree.map(lambda x: x[0], turns)

        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, rows, first_rows[0])
            weights = jax.tree.map(sum_over_devices, _weights(loss))
            return _share_of_mean(loss, _of_all_replicas(weights)), loss

        (value, loss), grads = jax.value_and_grad(objective, has_aux=True)(sinks)
        new_state = next_state(state, loss) if states is None else states.parts(loss)
        return Outcome(value, loss.metrics, new_state), grads

    assert states is not None, "no micro-batch is the whole batch"
    with taking_turns():
        return _accumulate_turns(loss_of, sinks, turns, first_rows, sum_over_devices, states)


def _accumulate_turns(
    loss_of: LossOf,
    sinks: PyTree,
    turns: PyTree,
    first_rows: jax.Array,
    sum_over_devices: Callable[[Any], Any],
    states: StateRules,
) -> tuple[Outcome, PyTree]:
    """Do what `accumulate` does, over several micro-batches."""
    first = jax.tree.map(lambda x: x[0], turns), first_rows[0]
    weights_of = _only_weights(loss_of, sinks, first, first_rows.shape[0])

    def weigh(weights: Any, turn: tuple[PyTree, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, weights, weights_of(turn)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(weights_of, first))
    weights, _ = jax.lax.scan(weigh, zeros, (turns, first_rows))
    weights = _of_all_replicas(jax.tree.map(sum_over_devices, weights))

    def add(carry: tuple[PyTree, list[jax.Array]], turn: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
        grads, state = carry

        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, *turn)
            return _share_of_mean(loss, weights), loss

        (value, loss), new = jax.value_and_grad(objective, has_aux=True)(sinks)
        return (jax.tree.map(jnp.add, grads, new), states.add(state, states.parts(loss))), (value, loss.metrics)

    # The sinks are zeros, so the sum of the gradients starts from them.
    (grads, state), (values, metrics) = jax.lax.scan(add, (sinks, states.start()), (turns, first_rows))
    return Outcome(values.sum(), {name: _combine_turns(metric) for name, metric in metrics.items()}, state), grads


def _only_weights(
    loss_of: LossOf, sinks: PyTree, example: tuple[PyTree, jax.Array], microbatches: int
) -> Callable[[Any], Weights]:
    """Return a function of a micro-batch that computes the loss's weights and nothing else.

    Weights do not depend on parameters, so little is left of the loss. It is cut out here and not by the compiler,
    which keeps what prints or calls back: the loss would do so twice.
    """

    def weights(turn: tuple[PyTree, jax.Array]) -> Weights:
        loss = loss_of(sinks, *turn)
        if not isinstance(loss.value, Mean):
            raise Unsuited(
                f"{microbatches} micro-batches need a loss that says its weight: return js.Mean(total, weight) "
                "instead of a scalar, so that micro-batches of unequal weight are averaged exactly"
            )
        return _weights(loss)

    program = Program.trace(weights, example)
    jaxpr, consts = open_jaxpr(program.closed)
    needed, used = eliminate_dead_code(without_callbacks(jaxpr))

    def weights_of(turn: tuple[PyTree, jax.Array]) -> Weights:
        given = [x for x, is_used in zip(jax.tree.leaves(turn), used, strict=True) if is_used]
        return tuple(jax.core.eval_jaxpr(needed, consts, *given))

    return weights_of


def _weights(loss: Loss) -> Weights:
    return jax.lax.stop_gradient(loss.value.weights) if isinstance(loss.value, Mean) else ()


def _of_all_replicas(weights: Weights) -> Weights:
    joint = joint_in_force()
    return weights if joint is None else joint.weigh(weights)


def _share_of_mean(loss: Loss, weights: Weights) -> jax.Array:
    return weighted_sum(loss.value, weights) if isinstance(loss.value, Mean) else loss.value


def _combine_turns(metric: Mean | Sum | Max) -> Mean | Sum | Max:
    """Combine a metric whose numbers are stacked, [turns]."""
    if isinstance(metric, Max):
        return Max(metric.value.max(0))
    combined: Mean | Sum = jax.tree.map(lambda x: x.sum(0, dtype=sum_dtype(x.dtype)), metric)
    return combined
