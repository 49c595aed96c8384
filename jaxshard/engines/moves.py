"""Moves by manual collectives: weights gathered, gradients reduced, each in the dtype or format of the engine."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core import scaled_collectives
from jaxshard.core.collectives import gather
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, View, axes_of, only_axes, spec_entry
from jaxshard.core.types import PyTree
from jaxshard.core.wire import Scaled
from jaxshard.engines.engine import Engine
from jaxshard.engines.just_in_time import MakeMove, Move, cast_floats
from jaxshard.engines.manual import nest_in_shard_map


def make_move(layout: Layout, engine: Engine) -> MakeMove:
    """Make moves by manual collectives: weights all-gathered, gradients reduced by `reduce_gradient`."""

    def make(param: Placement, grad: Placement | None) -> Move:
        def gather_weight(stored: jax.Array) -> jax.Array:
            dtype, keep, wire = engine.compute_dtype, axes_of(param.use), engine.gather_dtype
            moved = not set(axes_of(param.store)) <= set(keep) and jnp.issubdtype(stored.dtype, jnp.floating)
            move: partial[jax.Array]
            if wire is None or not moved:
                travels, move = cast_floats(stored, dtype), partial(gather, spec=param.store, keep=keep)
            elif isinstance(wire, Scaled):
                travels, move = stored, partial(scaled_collectives.gather, spec=param.store, wire=wire, keep=keep)
            else:
                travels, move = stored, partial(scaled_collectives.gather_bits, spec=param.store, dtype=wire, keep=keep)
            whole = nest_in_shard_map(layout, move, param.store)(travels)
            if moved and wire is not None:
                whole = whole.astype(dtype or stored.dtype)
            return param.view.invert(whole)

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None, "a frozen parameter has no cotangent"
            return cotangent if engine.scatter == "end" else reduce_gradient(layout, engine, grad, cotangent, param)

        return Move(gather_weight, reduce)

    return make


def reduce_gradient(
    layout: Layout, engine: Engine, grad: Placement, x: jax.Array, param: Placement, also: tuple[str, ...] = ()
) -> jax.Array:
    """Sum a device's share of a gradient over the axes of rows and context that the weight's `use` does not own.

    The sum is scattered over those axes that are in the gradient's `store`. The scatter comes first: the all-reduce
    over the other axes then moves a shard, not the whole array. For HSDP on (replica=2, data=4) and a gradient [64]

        [64] on each device  --reduce-scatter over data-->  [16]  --all-reduce over replica-->  [16]

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
    free = [axis for axis in (*layout.sum_axes, *also) if axis not in owned]
    if isinstance(engine.reduce_dtype, Scaled):
        return _reduce_scaled(layout, engine.reduce_dtype, grad, x, owned, free, None)[0]

    def scatter(x: jax.Array) -> jax.Array:
        return engine.sums(layout).scatter_sum(x, grad.store, free, keep=owned)

    # The view (padding, pipeline order) before the sum: what is scattered has the dimensions that are split.
    share = grad.view.apply(cast_floats(x, engine.reduce_dtype))
    if share.dtype.itemsize > 2 and layout.mesh.devices.flat[0].platform != "cpu":
        # Of a share that was computed in bf16 the compiler would move the cast behind the sum: a sum of bf16 numbers.
        share = lax.optimization_barrier(share)
    reduced: jax.Array = nest_in_shard_map(layout, scatter, grad.store)(share)
    return reduced.astype(x.dtype)


def _reduce_scaled(
    layout: Layout,
    wire: Scaled,
    grad: Placement,
    x: jax.Array,
    owned: tuple[str, ...],
    free: Sequence[str],
    residual: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Do what `reduce_gradient` does in a format of `js.wire`; return the shard and what rounding took, f32[share].

    `residual` is what it took in the step before, which is sent along.
    """

    def scatter(share: jax.Array, residual: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        wide = share.astype(jnp.float32)
        wide = wide if residual is None else wide + residual
        return scaled_collectives.scatter_sum(wide, grad.store, free, wire, share.dtype, keep=owned)

    args = (grad.view.apply(x),) if residual is None else (grad.view.apply(x), residual)
    total, error = nest_in_shard_map(layout, scatter, grad.store)(*args)
    return total.astype(x.dtype), error


class _Reduced(NamedTuple):
    """A gradient as stored, and what rounding took of it on this device."""

    total: jax.Array
    error: jax.Array | None


def reduce_all(layout: Layout, engine: Engine, grads: PyTree, residuals: PyTree) -> tuple[PyTree, PyTree]:
    """Reduce all gradients at the end of the turns.

    Args:
      layout: says where everything lives.
      engine: says in which dtype or format and order to add.
      grads: this device's shares.
      residuals: what rounding took from them in the step before, f32[1, *share], None where nothing was rounded; ()
        without feedback.

    Returns:
      (the gradients as stored, the new residuals).
    """
    params, wire = select(layout.trainable, layout.params), engine.reduce_dtype
    if not isinstance(wire, Scaled) or not wire.feedback:
        return jax.tree.map(partial(reduce_gradient, layout, engine), layout.grads, grads, params), ()

    def reduce(grad: Placement, x: jax.Array, param: Placement, residual: jax.Array | None) -> _Reduced:
        owned = axes_of(param.use)
        free = [axis for axis in layout.sum_axes if axis not in owned]
        earlier = None if residual is None else residual[0]
        total, error = _reduce_scaled(layout, wire, grad, x, owned, free, earlier)
        return _Reduced(total, None if residual is None else error[None])

    reduced = jax.tree.map(reduce, layout.grads, grads, params, residuals)
    totals, errors = (
        jax.tree.map(operator.itemgetter(part), reduced, is_leaf=lambda x: isinstance(x, _Reduced)) for part in (0, 1)
    )
    return totals, errors


def place_residual(layout: Layout, param: Placement, grad: Placement | None) -> Placement | None:
    """Return how the residual of a gradient lives, f32[devices that add, *stored shape]; None if it is frozen.

    Every device over whose axes the gradient is summed has one of the size of its share, before it is scattered.
    """
    if grad is None:
        return None
    owned, view = axes_of(param.use), grad.view
    free = tuple(axis for axis in layout.sum_axes if axis not in owned)
    count, store = axis_size(layout.mesh, free), PartitionSpec(spec_entry(free), *only_axes(grad.store, owned))
    return Placement(stack_view(view, count), store, store)


def stack_view(view: View, count: int) -> View:
    """Return the view of so many arrays of one view, along a dimension in front."""
    return View((count, *view.logical), (count, *view.padded), (count, *view.stored), view.extra_dims)
