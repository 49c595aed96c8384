"""The warm-up of `js.local`: steps in which every replica uses the loss and gradients of all replicas' rows.

    loss weights         summed over replicas before differentiation, so that each replica divides its sum of losses by
                         the total weight: the sum over replicas is then the mean over all rows
    loss, gradients      summed over replicas, in a conditional on the step's number

Replicas that begin equal then take the same step, as in `js.ddp`, and stay equal until the warm-up ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxshard.core.collectives import sum_scalar
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import Outcome
from jaxshard.engines.joint import Joint, joining
from jaxshard.optim.local import Local


def join_in_warm_up(
    local: Local, layout: Layout, step: jax.Array, value_and_grad: Callable[[], tuple[Outcome, PyTree]]
) -> tuple[Outcome, PyTree]:
    """Compute a replica's loss and gradients; during the warm-up, sum them over all replicas.

    Traced inside a `shard_map` over the axis of the replicas.

    Args:
      local: the `js.local` of the strategy, which has the number of warm-up steps.
      layout: the layout of one replica.
      step: the number of steps taken before this step.
      value_and_grad: the engine's function that computes loss and gradients for this replica's rows.

    Returns:
      (an `Outcome` with the loss of all replicas and this replica's metrics, the stored gradients).

    Raises:
      Unsuited: the loss is a scalar without a weight.
      ValueError: the engine did not call `Joint.weigh` to sum the loss weights over replicas.
    """
    if not local.warmup:
        return value_and_grad()
    joint = Joint(step < local.warmup, local.axis)
    with joining(joint):
        outcome, grads = value_and_grad()
    if not joint.asked:
        raise ValueError(
            "local: warmup joins the gradients of all replicas by the weights of their losses, which this engine does "
            "not show; use js.auto() or js.explicit(), or warmup=0"
        )
    # Scalars of replicas can't be combined to that of all rows: they may be sums, means or neither.
    if not all(joint.asked):
        raise Unsuited(
            "local: warmup needs a loss that says its weight, so that the rows of all replicas make one mean: return "
            "js.Mean(total, weight) instead of a scalar, or use warmup=0"
        )

    def add(value: jax.Array, grads: PyTree) -> tuple[jax.Array, PyTree]:
        return sum_scalar(value, local.axis), _sum(layout, local, grads)

    def leave(value: jax.Array, grads: PyTree) -> tuple[jax.Array, PyTree]:
        return value, grads

    value, grads = lax.cond(joint.now, add, leave, outcome.value, grads)
    return outcome._replace(value=value), grads


def _sum(layout: Layout, local: Local, grads: PyTree) -> PyTree:
    """Sum stored gradients over replicas, by one all-reduce of each device's shard."""

    def total(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda x: sum_scalar(x, local.axis), grads)

    # Without this the compiler would first gather arrays that the other axes split (JAX 0.10 to 0.12).
    others = set(layout.mesh.axis_names) - set(local.axis)
    if not others:
        return total(grads)
    specs = jax.tree.map(lambda placement: placement.store, layout.grads)
    summed: PyTree = jax.shard_map(total, in_specs=(specs,), out_specs=specs, axis_names=others, check_vma=False)(grads)
    return summed
