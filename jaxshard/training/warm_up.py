"""The warm-up of `js.local`: steps in which every replica has the loss and gradients of all replicas' rows.

    weights of the loss     summed over replicas before it is differentiated, so that each has its share of one mean
    loss, gradients         summed over replicas, in a conditional that the step's number alone decides

Replicas that begin alike then take the same step, the one of `js.ddp`, and stay alike until the warm-up ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxshard.core.collectives import sum_scalar
from jaxshard.core.layout import Layout
from jaxshard.core.local import Local
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import Outcome
from jaxshard.engines.joint import Joint, joining


def join_in_warm_up(
    local: Local, layout: Layout, step: jax.Array, value_and_grad: Callable[[], tuple[Outcome, PyTree]]
) -> tuple[Outcome, PyTree]:
    """Compute a replica's loss and gradients; in the first steps those of all replicas together.

    Traced inside a `shard_map` over the axis of the replicas.

    Args:
      local: says which steps these are.
      layout: of one replica.
      step: the number of steps before this one.
      value_and_grad: the engine's function for this replica's rows.

    Returns:
      The outcome, whose value is joined and whose metrics are this replica's, and the gradients as stored.

    Raises:
      Unsuited: the loss is a scalar, which says no weight.
      ValueError: the engine does not say how much the rows of a replica weigh.
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
    # A scalar of all rows does not follow from those of each replica's: it may be a sum, a mean or neither.
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
    """Sum stored gradients over replicas; one all-reduce of each, of a device's part alone."""

    def total(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda x: sum_scalar(x, local.axis), grads)

    # Left to the compiler, what the other axes split would be gathered over them first (JAX 0.10 to 0.12).
    others = set(layout.mesh.axis_names) - set(local.axis)
    if not others:
        return total(grads)
    specs = jax.tree.map(lambda placement: placement.store, layout.grads)
    summed: PyTree = jax.shard_map(total, in_specs=(specs,), out_specs=specs, axis_names=others, check_vma=False)(grads)
    return summed
