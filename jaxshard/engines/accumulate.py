"""The gradient of a loss over micro-batches, each exactly as large a share of the global mean as its weight says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.adapt.stacked import RematPolicy, saveable_of
from jaxshard.adapt.units import Units
from jaxshard.core.layout import Layout
from jaxshard.core.loss import Loss, Max, Mean, Sum, weighted_sum
from jaxshard.core.tree import abstract, check_same_tree
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.just_in_time import Scatter

Reduction = Literal["native", "ordered"]


class Outcome(NamedTuple):
    """What a step knows of its loss: the value, the named metrics and the model's new state."""

    value: jax.Array
    metrics: dict[str, Mean | Sum | Max]
    state: PyTree


@dataclass(frozen=True)
class Engine:
    """What engines have in common.

    Args:
      microbatches: the rows of a batch are computed in that many turns and their gradients added.
      scatter: reduce the gradient of each micro-batch ("each", least memory) or their sum once ("end", least traffic).
      compute_dtype: floating weights are cast to it before they are gathered; None leaves them.
      reduce_dtype: gradients are reduced in it; None takes the parameter's dtype.
      remat: what the forward pass of a block or unit saves: "nothing", "dots", "everything" or a checkpoint policy.
      units: classes of modules of `js.linen` or `js.nnx` whose parameters are gathered while each of them runs.
      reduction: sums over devices in whatever order the hardware likes ("native"), or in one order ("ordered").
    """

    microbatches: int = 1
    scatter: Scatter = "each"
    compute_dtype: Any = None
    reduce_dtype: Any = None
    remat: RematPolicy = "everything"
    units: Sequence[type] = ()
    reduction: Reduction = "native"

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, Integral) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches must be a whole number from 1 on, got {self.microbatches!r}")
        object.__setattr__(self, "microbatches", int(self.microbatches))
        if self.scatter not in ("each", "end"):
            raise ValueError(f"scatter must be 'each' or 'end', got {self.scatter!r}")
        if self.reduction not in ("native", "ordered"):
            raise ValueError(f"reduction must be 'native' or 'ordered', got {self.reduction!r}")
        _check_dtype("compute_dtype", self.compute_dtype)
        _check_dtype("reduce_dtype", self.reduce_dtype)
        saveable_of(self.remat)
        object.__setattr__(self, "units", _checked_units(self.units))

    def compiler_options(self, mesh: Mesh) -> dict[str, Any] | None:
        """Options with which a step is compiled."""
        # The CPU compiler of JAX 0.10 drops the barrier before a unit's second gather and merges it with the first.
        cpu = mesh.devices.flat[0].platform == "cpu"
        return {"xla_disable_hlo_passes": "cse_barrier_expander"} if self.units and cpu else None

    def value_and_grad(self, loss_fn: LossFn, layout: Layout) -> Callable[..., tuple[Outcome, PyTree]]:
        """`fn(stored parameters, state, batch, key) -> (Outcome, gradients as stored)` of global arrays, under jit."""
        raise NotImplementedError(f"{type(self).__name__} has no value_and_grad")


def _checked_units(units: Any) -> Units:
    if not isinstance(units, (list, tuple)) or not all(isinstance(unit, type) for unit in units):
        got = f"the class {units.__name__} alone" if isinstance(units, type) else repr(units)
        raise TypeError(f"units must be a list of classes of modules such as [Block], got {got}")
    return tuple(units)


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(f"{name} must be a floating dtype such as jnp.bfloat16, got {dtype!r}")


LossOf = Callable[[PyTree, PyTree, PyTree, Any], Loss]
"""`loss_of(sinks, state, rows, row)`: the loss of some rows, `row` the global number of the first."""


def value_and_grad(
    loss_of: LossOf, sinks: PyTree, state: PyTree, turns: PyTree, first_rows: jax.Array, total: Callable[[Any], Any]
) -> tuple[Outcome, PyTree]:
    """The loss over all turns and its gradient with respect to the sinks.

    `turns` holds the batch as [turns, rows, ...], `first_rows` [turns] the global number of each turn's first row;
    `total` sums a scalar over the devices that hold other rows. The value, and the metrics, are those of this
    device's rows: the caller adds them up. Reference: sum over turns of grad(total_i / total(sum over turns of
    weight_i)).
    """
    if first_rows.shape[0] == 1:
        rows = jax.tree.map(lambda x: x[0], turns)

        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, state, rows, first_rows[0])
            return _share(loss, jax.tree.map(total, _weights(loss))), loss

        (value, loss), grads = jax.value_and_grad(objective, has_aux=True)(sinks)
        return Outcome(value, loss.metrics, next_state(state, loss)), grads

    example = jax.eval_shape(loss_of, sinks, state, jax.tree.map(lambda x: x[0], turns), first_rows[0])
    if not isinstance(example.value, Mean):
        raise TypeError(
            f"{first_rows.shape[0]} micro-batches need a loss that says its weight: return js.Mean(total, weight) "
            "instead of a scalar, so that micro-batches of unequal weight are averaged exactly"
        )

    def weigh(weights: Any, turn: tuple[PyTree, jax.Array]) -> tuple[Any, None]:
        # Weights do not depend on parameters, so the compiler drops all else from this pass.
        return jax.tree.map(jnp.add, weights, _weights(loss_of(sinks, state, *turn))), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example.value.weights)
    weights, _ = jax.lax.scan(weigh, zeros, (turns, first_rows))
    weights = jax.tree.map(total, weights)

    def add(carry: tuple[PyTree, PyTree], turn: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
        grads, state = carry

        def objective(sinks: PyTree) -> tuple[jax.Array, Loss]:
            loss = loss_of(sinks, state, *turn)
            return _share(loss, weights), loss

        (value, loss), new = jax.value_and_grad(objective, has_aux=True)(sinks)
        return (jax.tree.map(jnp.add, grads, new), next_state(state, loss)), (value, loss.metrics)

    (grads, state), (values, metrics) = jax.lax.scan(add, (sinks, state), (turns, first_rows))
    return Outcome(values.sum(), {name: _fold(metric) for name, metric in metrics.items()}, state), grads


def next_state(state: PyTree, loss: Loss) -> PyTree:
    """The model's state after a loss; the old one where the loss has none to say."""
    if loss.state is None:
        return state
    check_same_tree(
        abstract(state), abstract(loss.state), "the loss returned another state than the model has", "keep its tree"
    )
    return loss.state


def _weights(loss: Loss) -> tuple[jax.Array, ...]:
    return jax.lax.stop_gradient(loss.value.weights) if isinstance(loss.value, Mean) else ()


def _share(loss: Loss, weights: tuple[jax.Array, ...]) -> jax.Array:
    return weighted_sum(loss.value, weights) if isinstance(loss.value, Mean) else loss.value


def _fold(metric: Mean | Sum | Max) -> Mean | Sum | Max:
    if isinstance(metric, Max):
        return Max(metric.value.max(0))
    return jax.tree.map(lambda x: x.sum(0), metric)
