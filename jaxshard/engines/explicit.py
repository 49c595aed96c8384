"""The explicit engine: `shard_map` over the batch and shard axes, with exactly the collectives of the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import RematPolicy
from jaxshard.core.collectives import NATIVE, Sums, all_max, gather, total
from jaxshard.core.layout import Layout, only
from jaxshard.core.loss import Loss, Max, Mean, Sum
from jaxshard.core.ordered_sums import ORDERED
from jaxshard.core.placement import Placement, axes_of, only_axes
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import Engine, Outcome, Reduction, Scatter, value_and_grad
from jaxshard.engines.just_in_time import MakeMove, Move, cast, make_call


@dataclass(frozen=True)
class Explicit(Engine):
    """Manual collectives: all-gather just before use, reduce-scatter of each gradient where it is born."""

    def value_and_grad(self, loss_fn: LossFn, layout: Layout) -> Callable[..., tuple[Outcome, PyTree]]:
        """`fn(stored parameters, state, batch, key) -> (Outcome, gradients as stored)` of global arrays, under jit."""
        axes, sums = layout.batch_axes, sums_of(self, layout)
        call = make_call(loss_fn, layout, make_move(layout, self), self.remat, tuple(self.units))

        def on_device(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            turns, first_rows = _turns(batch, self.microbatches, axes)
            outcome, grads = value_and_grad(
                lambda sinks, state, rows, row: _needs_mean(call(params, sinks, state, rows, key, row)),
                _sinks(layout, self.scatter), state, turns, first_rows, total=lambda x: total(x, axes, sums),
            )  # fmt: skip
            if self.scatter == "end":
                reduce = partial(reduced, layout, self)
                grads = jax.tree.map(reduce, layout.grads, grads, only(layout.trainable, layout.params))
            metrics = {name: combined(metric, axes, sums) for name, metric in outcome.metrics.items()}
            return Outcome(total(outcome.value, axes, sums), metrics, _agree(outcome.state, axes, sums)), grads

        def loss_and_grads(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            manual = manual_axes(layout)
            if not manual:
                return on_device(params, state, batch, key)

            def specs(placements: PyTree) -> PyTree:
                return jax.tree.map(lambda placement: only_axes(placement.store, manual), placements)

            rows = jax.tree.map(lambda x: layout.batch_placement(x).store, batch)
            return jax.shard_map(
                on_device,
                mesh=layout.mesh,
                in_specs=(specs(layout.params), PartitionSpec(), rows, PartitionSpec()),
                out_specs=(PartitionSpec(), specs(layout.grads)),
                axis_names=manual,
                check_vma=False,
            )(params, state, batch, key)

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
    """The engine that issues exactly the collectives of the layout.

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


def sums_of(engine: Engine, layout: Layout) -> Sums:
    """How an engine adds over devices.

    Raises:
      ValueError: in one order, but over axes that the compiler handles.
    """
    if engine.reduction == "native":
        return NATIVE
    axes = sorted({axis for p in jax.tree.leaves(layout.params) for axis in axes_of(p.use)})
    if axes or layout.pipeline is not None:
        what = f"a pipeline over {layout.pipeline.axis!r}" if layout.pipeline else f"weights used split over {axes}"
        raise ValueError(
            f"reduction='ordered' orders the sums over the batch axes {list(layout.batch_axes)}, but the layout has "
            f"{what}, whose sums the compiler orders as it likes; use reduction='native', or data axes alone"
        )
    return ORDERED


def manual_axes(layout: Layout) -> set[str]:
    """The mesh axes that `shard_map` handles: those of the batch, and those that split what is stored but not used.

    None under tensor parallelism alone, whose collectives the compiler derives.
    """
    axes = set(layout.batch_axes)
    for placement in (*jax.tree.leaves(layout.params), *jax.tree.leaves(layout.grads)):
        axes |= set(axes_of(placement.store)) - set(axes_of(placement.use))
    return axes


def make_move(layout: Layout, engine: Engine) -> MakeMove:
    """Weights all-gathered, gradients scattered over the batch axes that their weight's use does not own."""

    def make(param: Placement, grad: Placement | None) -> Move:
        def fetch(stored: jax.Array) -> jax.Array:
            def whole(x: jax.Array) -> jax.Array:
                return gather(x, param.store, keep=axes_of(param.use))

            return param.view.invert(_nested(layout, whole, param.store)(cast(stored, engine.compute_dtype)))

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None, "a frozen parameter has no cotangent"
            return cotangent if engine.scatter == "end" else reduced(layout, engine, grad, cotangent, param)

        return Move(fetch, reduce)

    return make


def reduced(
    layout: Layout, engine: Engine, grad: Placement, x: jax.Array, param: Placement, also: tuple[str, ...] = ()
) -> jax.Array:
    """A device's share of a gradient, as the model knows it, summed over batch axes and `also`, and as it rests."""
    owned = axes_of(param.use)
    free = [axis for axis in (*layout.batch_axes, *also) if axis not in owned]

    def scatter(x: jax.Array) -> jax.Array:
        return sums_of(engine, layout).scatter_sum(x, grad.store, free, keep=owned)

    share = grad.view.apply(cast(x, engine.reduce_dtype))
    return _nested(layout, scatter, grad.store)(share).astype(x.dtype)


def _nested(layout: Layout, fn: Callable, spec: PartitionSpec) -> Callable:
    """`fn` in a `shard_map` over the axes that the compiler handles, so that its collectives are manual over all axes.

    A manual collective of an array that is also split over an automatic axis gathers it over that axis too (JAX 0.10 to
    0.12), and in bf16, split or not, it aborts the CPU compiler.
    """
    manual = manual_axes(layout)
    automatic = set(layout.mesh.axis_names) - manual
    if not automatic or not manual:
        return fn
    own = only_axes(spec, automatic)
    return jax.shard_map(fn, in_specs=own, out_specs=own, axis_names=automatic, check_vma=False)


def _sinks(layout: Layout, scatter: Scatter) -> PyTree:
    manual = manual_axes(layout)

    def sink(x: Any, grad: Placement | None) -> jax.Array | None:
        if grad is None:
            return None
        if scatter == "end":
            return jnp.zeros(grad.view.logical, x.dtype)
        mine = replace(grad, store=only_axes(grad.store, manual))
        return jnp.zeros(mine.shard_shape(layout.mesh), x.dtype)

    return jax.tree.map(sink, layout.shapes.params, layout.grads)


def _turns(batch: PyTree, count: int, axes: tuple[str, ...]) -> tuple[PyTree, jax.Array]:
    """This device's rows as [turns, rows, ...], and the global number of each turn's first row."""
    rows = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=count)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (count,))

    first = lax.axis_index(axes) * rows if axes else 0
    return jax.tree.map(split, batch), first + jnp.arange(count) * (rows // count)


def _needs_mean(loss: Loss) -> Loss:
    if not isinstance(loss.value, Mean):
        raise TypeError(
            "js.explicit needs a loss that says its weight; return js.Mean(total, weight), summed over devices and "
            "divided once; a scalar is opaque and runs under js.auto()"
        )
    return loss


def combined(metric: Mean | Sum | Max, axes: tuple[str, ...], sums: Sums = NATIVE) -> Mean | Sum | Max:
    """A metric of all rows from those of each device."""
    if isinstance(metric, Max):
        return Max(all_max(metric.value, axes))
    return jax.tree.map(lambda x: total(x, axes, sums), metric)


def _agree(state: PyTree, axes: tuple[str, ...], sums: Sums) -> PyTree:
    """The model's state: the same on every device where rows are independent; floats are averaged all the same."""
    if not axes:
        return state

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return lax.pmean(x, axes) if sums is NATIVE else sums.all_sum(x, axes) / lax.axis_size(axes)

    return jax.tree.map(mean, state)
