"""The explicit engine: `shard_map` over the batch and shard axes, with exactly the collectives of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.objective import Objective
from jaxshard.adapt.stacked import RematPolicy
from jaxshard.core.collectives import NATIVE, Sums, all_max, gather, sum_scalar
from jaxshard.core.layout import Layout, select
from jaxshard.core.loss import Loss, Max, Mean, Sum
from jaxshard.core.ordered_sums import ORDERED
from jaxshard.core.placement import Placement, axes_of, only_axes
from jaxshard.core.types import PyTree
from jaxshard.engines.accumulate import accumulate
from jaxshard.engines.engine import Engine, Outcome, Reduction, Scatter, ValueAndGrad, WholeModelEngine
from jaxshard.engines.just_in_time import MakeMove, Move, cast_floats
from jaxshard.engines.manual import data_axes, on_each_device, row_specs, stored_specs, with_automatic_axes


@dataclass(frozen=True)
class Explicit(WholeModelEngine):
    """Manual collectives: all-gather just before use, reduce-scatter of each gradient where it is born.

    Args:
      reduction: sums over devices in whatever order the hardware likes ("native"), or in one order ("ordered").
    """

    reduction: Reduction = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("native", "ordered"):
            raise ValueError(f"reduction must be 'native' or 'ordered', got {self.reduction!r}")

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return the mesh axes over which the loss runs once per device."""
        return data_axes(layout)

    def sums(self, layout: Layout) -> Sums:
        """Return how shares are added over devices.

        Raises:
          ValueError: in one order, but over axes that the compiler handles.
        """
        if self.reduction == "native":
            return NATIVE
        axes = sorted({axis for p in jax.tree.leaves(layout.params) for axis in axes_of(p.use)})
        if axes or layout.pipeline is not None:
            what = f"a pipeline over {layout.pipeline.axis!r}" if layout.pipeline else f"weights used split over {axes}"
            raise ValueError(
                f"reduction='ordered' orders the sums over the batch axes {list(layout.batch_axes)}, but the layout "
                f"has {what}, whose sums the compiler orders as it likes; use reduction='native', or data axes alone"
            )
        return ORDERED

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and its choices, for reports."""
        return super().describe() | {"reduction": self.reduction}

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes loss and gradient, each device on its own rows."""
        axes, sums = layout.batch_axes, self.sums(layout)
        manual = self.manual_axes(layout)
        call = self.make_call(objective, layout, make_move(layout, self))

        def on_device(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            def loss_of(sinks: PyTree, state: PyTree, rows: PyTree, row: Any) -> Loss:
                return _check_mean(call(params, sinks, state, rows, key, row))

            turns, first_rows = _turns(batch, self.microbatches, axes)
            sinks = _sinks(layout, self.scatter)
            outcome, grads = accumulate(
                loss_of, sinks, state, turns, first_rows, total=lambda x: sum_scalar(x, axes, sums)
            )
            if self.scatter == "end":
                reduce = partial(reduce_gradient, layout, self)
                grads = jax.tree.map(reduce, layout.grads, grads, select(layout.trainable, layout.params))
            metrics = {name: combine_over(metric, axes, sums) for name, metric in outcome.metrics.items()}
            value = sum_scalar(outcome.value, axes, sums)
            return Outcome(value, metrics, _average_state(outcome.state, axes, sums)), grads

        def loss_and_grads(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            whole = PartitionSpec()
            in_specs = stored_specs(layout.params, manual), whole, row_specs(layout, batch), whole
            out_specs = whole, stored_specs(layout.grads, manual)
            run = on_each_device(on_device, layout, manual, in_specs=in_specs, out_specs=out_specs)
            return run(params, state, batch, key)

        return loss_and_grads


def explicit(
    *,
    microbatches: int = 1,
    scatter: Scatter = "each",
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    remat: RematPolicy = "everything",
    units: Sequence[type] = (),
    reduction: Reduction = "native",
) -> Explicit:
    """Make the engine that issues exactly the collectives of the layout.

    Each weight is all-gathered just before use (over the axes of the parameter's `store` that its `use` lacks) and
    each gradient reduce-scattered over the batch axes in its `store` and all-reduced over the others. Choosing it
    asserts that the rows of a batch are independent and that the loss is a `js.Mean`; each device computes its own
    rows.

    Args:
      microbatches: the rows of a batch are computed in that many turns and their gradients added.
      scatter: reduce the gradient of each micro-batch ("each", least memory) or their sum once ("end", least traffic).
      compute_dtype: floating weights are cast to it before they are gathered; None leaves them.
      reduce_dtype: gradients are reduced in it; None takes the parameter's dtype.
      remat: what the forward pass of a block of a `Stacked` model, or of a unit, saves: "nothing", "dots",
        "everything" or a function of `jax.checkpoint_policies`. Gathered weights are never saved.
      units: classes of modules of a `js.linen` or `js.nnx` model, such as [Block]. While a module of these classes
        runs its parameters are whole: gathered just before, dropped after, gathered again in the backward pass. All
        other parameters are gathered at once. A unit inside another runs with the outer one; a class that never runs
        by itself is refused. The peak falls most with remat="nothing": activations are then one unit's too.
      reduction: "ordered" adds over devices in one order, so that losses and parameters are the same bits for every
        number of processes that the devices are spread over; "native" leaves the order to the hardware. Ordered, a
        reduce-scatter is an all-to-all, and an all-reduce an all-to-all and an all-gather: as many bytes, but each
        result is as large as the whole gradient until it is added up. Not beside tensor axes; the optimizer must be
        elementwise but for sums over all parameters (a global norm). What the loss itself sums over devices by axis
        name stays native.
    """
    return Explicit(microbatches, scatter, compute_dtype, reduce_dtype, remat, units, reduction)


def make_move(layout: Layout, engine: Engine) -> MakeMove:
    """Make moves by manual collectives: weights all-gathered, gradients reduced by `reduce_gradient`."""

    def make(param: Placement, grad: Placement | None) -> Move:
        def gather_weight(stored: jax.Array) -> jax.Array:
            def gather_shards(x: jax.Array) -> jax.Array:
                return gather(x, param.store, keep=axes_of(param.use))

            whole = with_automatic_axes(layout, gather_shards, param.store)(cast_floats(stored, engine.compute_dtype))
            return param.view.invert(whole)

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None, "a frozen parameter has no cotangent"
            return cotangent if engine.scatter == "end" else reduce_gradient(layout, engine, grad, cotangent, param)

        return Move(gather_weight, reduce)

    return make


def reduce_gradient(
    layout: Layout, engine: Engine, grad: Placement, x: jax.Array, param: Placement, also: tuple[str, ...] = ()
) -> jax.Array:
    """Sum a device's share of a gradient over the batch axes that the weight's `use` does not own.

    The sum is scattered over those axes that are in the gradient's `store`.

    Args:
      layout: says where everything lives.
      engine: says in which dtype and order to add.
      grad: where the gradient rests.
      x: the share, as the model knows the weight (logical shape).
      param: where the parameter rests and how it is used.
      also: further mesh axes to sum over.

    Returns:
      This device's shard of the gradient, as stored.
    """
    owned = axes_of(param.use)
    free = [axis for axis in (*layout.batch_axes, *also) if axis not in owned]

    def scatter(x: jax.Array) -> jax.Array:
        return engine.sums(layout).scatter_sum(x, grad.store, free, keep=owned)

    share = grad.view.apply(cast_floats(x, engine.reduce_dtype))
    reduced: jax.Array = with_automatic_axes(layout, scatter, grad.store)(share)
    return reduced.astype(x.dtype)


def _sinks(layout: Layout, scatter: Scatter) -> PyTree:
    """Zeros like the gradients, with respect to which the loss is differentiated; see `just_in_time`."""
    manual = data_axes(layout)

    def sink(x: Any, grad: Placement | None) -> jax.Array | None:
        if grad is None:
            return None
        if scatter == "end":
            return jnp.zeros(grad.view.logical, x.dtype)
        mine = replace(grad, store=only_axes(grad.store, manual))
        return jnp.zeros(mine.shard_shape(layout.mesh), x.dtype)

    return jax.tree.map(sink, layout.shapes.params, layout.grads)


def _turns(batch: PyTree, count: int, axes: tuple[str, ...]) -> tuple[PyTree, jax.Array]:
    """Cut this device's rows into [turns, rows, ...]; also return the global number of each turn's first row."""
    rows = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=count)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (count,))

    first = lax.axis_index(axes) * rows if axes else 0
    return jax.tree.map(split, batch), first + jnp.arange(count) * (rows // count)


def _check_mean(loss: Loss) -> Loss:
    if not isinstance(loss.value, Mean):
        raise TypeError(
            "js.explicit needs a loss that says its weight; return js.Mean(total, weight), summed over devices and "
            "divided once; a scalar is opaque and runs under js.auto()"
        )
    return loss


def combine_over(metric: Mean | Sum | Max, axes: tuple[str, ...], sums: Sums = NATIVE) -> Mean | Sum | Max:
    """Combine a metric of each device's rows to that of all rows. One all-reduce of each of its numbers."""
    if isinstance(metric, Max):
        return Max(all_max(metric.value, axes))
    combined: Mean | Sum = jax.tree.map(lambda x: sum_scalar(x, axes, sums), metric)
    return combined


def _average_state(state: PyTree, axes: tuple[str, ...], sums: Sums) -> PyTree:
    """Average floating state over devices: where rows are independent it is the same on all of them anyway."""
    if not axes:
        return state

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return sums.all_sum(x, axes) / lax.axis_size(axes) if sums.in_order else lax.pmean(x, axes)

    return jax.tree.map(mean, state)
