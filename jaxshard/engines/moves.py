"""Gather weights and reduce gradients by manual collectives, in the dtypes or wire formats of the engine."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core import encoded_collectives as encoded
from jaxshard.core.collectives import gather
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, View, axes_of, only_axes, spec_entry
from jaxshard.core.types import PyTree
from jaxshard.core.wire import Format
from jaxshard.engines.engine import Engine
from jaxshard.engines.just_in_time import MakeMove, Move, cast_floats
from jaxshard.engines.manual import nest_in_shard_map
from jaxshard.engines.rounded_weights import Rounded, gather_rounded


def make_move(layout: Layout, engine: Engine) -> MakeMove:
    """Return a function that makes the `Move` of one weight: an all-gather of the weight, a reduction of its gradient.

    These are manual collectives, in the dtypes or wire formats of the engine. With scatter="end" a `Move` leaves the
    gradient unreduced, for `reduce_all`.
    """

    def make(param: Placement, grad: Placement | None) -> Move:
        def gather_weight(stored: jax.Array | Rounded) -> jax.Array:
            dtype, keep, wire = engine.compute_dtype, axes_of(param.use), engine.gather_dtype
            if isinstance(stored, Rounded):
                return param.view.invert(gather_rounded(layout, param, stored, dtype))
            if engine.gathers_rounded:
                wire = None  # a weight that the model does not round
            moved = not set(axes_of(param.store)) <= set(keep) and jnp.issubdtype(stored.dtype, jnp.floating)
            move: partial[jax.Array]
            if wire is None or not moved:
                travels, move = cast_floats(stored, dtype), partial(gather, spec=param.store, keep=keep)
            elif isinstance(wire, Format):
                travels, move = stored, partial(encoded.gather, spec=param.store, wire=wire, keep=keep)
            else:
                travels, move = stored, partial(encoded.gather_bits, spec=param.store, dtype=wire, keep=keep)
            whole = nest_in_shard_map(layout, move, param.store)(travels)
            if moved and wire is not None:
                whole = whole.astype(dtype or stored.dtype)
            return param.view.invert(whole)

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None, "a frozen parameter has no cotangent"
            return cotangent if engine.scatter == "end" else reduce_gradient(layout, engine, grad, cotangent, param)

        return Move(gather_weight, reduce, engine.reduced_dtype)

    return make


def reduce_gradient(
    layout: Layout, engine: Engine, grad: Placement, x: jax.Array, param: Placement, also: tuple[str, ...] = ()
) -> jax.Array:
    """Sum a gradient over devices, and return this device's shard of the sum.

    The sum is over the mesh axes that split rows or sequence positions, except axes that split the weight itself in
    use. It is a reduce-scatter over the axes in the gradient's `store`, then an all-reduce over the remaining axes,
    which therefore moves a shard and not the full array. For HSDP on (replica=2, data=4) and a gradient [64]

        [64] on each device  --reduce-scatter over data-->  [16]  --all-reduce over replica-->  [16]

    Args:
      layout: the layout.
      engine: says in which dtype and order to add.
      grad: the gradient's placement.
      x: the gradient of this device's rows, in the weight's logical shape.
      param: the parameter's placement.
      also: further mesh axes to sum over.

    Returns:
      This device's shard of the gradient, as stored.
    """
    owned = axes_of(param.use)
    free = [axis for axis in (*layout.sum_axes, *also) if axis not in owned]
    if isinstance(engine.reduce_dtype, Format):
        return _reduce_encoded(layout, engine.reduce_dtype, grad, x, owned, free, None)[0]

    def scatter(x: jax.Array) -> jax.Array:
        return engine.sums(layout).scatter_sum(x, grad.store, free, keep=owned)

    # Apply the view (padding, pipeline order) before the sum, as `store` splits the dimensions of the stored shape.
    share = grad.view.apply(cast_floats(x, engine.reduce_dtype))
    if share.dtype.itemsize > 2 and layout.mesh.devices.flat[0].platform != "cpu":
        # The compiler would move the cast of a bf16 share after the sum, and so add in bf16.
        share = lax.optimization_barrier(share)
    reduced: jax.Array = nest_in_shard_map(layout, scatter, grad.store)(share)
    return reduced.astype(x.dtype)


def _reduce_encoded(
    layout: Layout,
    wire: Format,
    grad: Placement,
    x: jax.Array,
    owned: tuple[str, ...],
    free: Sequence[str],
    residual: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Sum a gradient over devices like `reduce_gradient`, but send it in a format of `js.wire`.

    Args:
      layout: the layout.
      wire: the format.
      grad: the gradient's placement.
      x: the gradient of this device's rows.
      owned: the mesh axes that split the weight in use, over which nothing is summed.
      free: the mesh axes to sum over.
      residual: the rounding error of the previous step, which is added before rounding; None without feedback.

    Returns:
      (this device's shard of the sum, the rounding error of what this device sent, in f32).
    """

    def scatter(share: jax.Array, residual: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        wide = share.astype(jnp.float32)
        wide = wide if residual is None else wide + residual
        return encoded.scatter_sum(wide, grad.store, free, wire, share.dtype, keep=owned)

    args = (grad.view.apply(x),) if residual is None else (grad.view.apply(x), residual)
    total, error = nest_in_shard_map(layout, scatter, grad.store)(*args)
    return total.astype(x.dtype), error


class _Reduced(NamedTuple):
    """A reduced gradient as stored, and the rounding error that this device made in sending its share.

    `error` is None for a gradient without rounding errors.
    """

    total: jax.Array
    error: jax.Array | None


def reduce_all(layout: Layout, engine: Engine, grads: PyTree, residuals: PyTree) -> tuple[PyTree, PyTree]:
    """Sum all gradients over devices, after the last micro-batch.

    Args:
      layout: the layout.
      engine: says in which dtype or wire format, and in which order, to add.
      grads: the gradients of this device's rows, summed over its micro-batches.
      residuals: the rounding errors of the previous step, f32[1, ...] for each gradient and None for frozen parameters;
        () without feedback.

    Returns:
      (this device's shards of the gradients, the new rounding errors).
    """
    params = select(layout.trainable, layout.params)
    if not engine.feedback:
        return jax.tree.map(partial(reduce_gradient, layout, engine), layout.grads, grads, params), ()

    def reduce(grad: Placement, x: jax.Array, param: Placement, residual: jax.Array | None) -> _Reduced:
        owned = axes_of(param.use)
        free = [axis for axis in layout.sum_axes if axis not in owned]
        earlier = None if residual is None else residual[0]
        total, error = _reduce_encoded(layout, engine.reduce_dtype, grad, x, owned, free, earlier)
        return _Reduced(total, None if residual is None else error[None])

    reduced = jax.tree.map(reduce, layout.grads, grads, params, residuals)
    totals, errors = (
        jax.tree.map(operator.itemgetter(part), reduced, is_leaf=lambda x: isinstance(x, _Reduced)) for part in (0, 1)
    )
    return totals, errors


def place_residual(layout: Layout, param: Placement, grad: Placement | None) -> Placement | None:
    """Return the placement of a gradient's rounding error, f32[devices that add, ...]; None for a frozen parameter.

    Every device that contributes to the sum stores its own rounding error, which has the shape of its gradient before
    the reduce-scatter.
    """
    if grad is None:
        return None
    owned, view = axes_of(param.use), grad.view
    free = tuple(axis for axis in layout.sum_axes if axis not in owned)
    count, store = axis_size(layout.mesh, free), PartitionSpec(spec_entry(free), *only_axes(grad.store, owned))
    return Placement(stack_view(view, count), store, store)


def stack_view(view: View, count: int) -> View:
    """Return the view of `count` arrays that are stacked along a new first dimension, given the view of each array.

    A view says how an array is padded and reshaped for storage.
    """
    return View((count, *view.logical), (count, *view.padded), (count, *view.stored), view.extra_dims)
