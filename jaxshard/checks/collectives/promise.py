"""Derive the collectives that a step may issue (its promise) from the placements of the arrays in its layout.

Nothing here knows a strategy's name. A weight is gathered over the axes that its `store` has and its `use` lacks. A
gradient is reduced over the batch axes that are not in the weight's `use`. A new parameter is gathered over the axes
that split only its optimizer state. Over the axes of `use` the compiler moves activations, never weights.

For example, a kernel [32, 128] in each of two stacked blocks, under `js.compose(js.fsdp(), js.tensor())` on a mesh
(data=4, tensor=2):

    store   (None, "data", "tensor")    two blocks of 8 x 64 on each device
    use     (None, None, "tensor")      one block of 32 x 64 while it runs

    all-gather       over data      f32[32, 64]    4 times    32,768 bytes     forward and backward pass of two blocks
    reduce-scatter   over data      f32[32, 64]    2 times    16,384 bytes     the gradients
    all-reduce       over tensor    activations    as needed
    never            over tensor    [32, 128], [2, 32, 128], [8, 128], ...     the weight in any form

The engine's own collectives are in this file, those that a compiler may add in `compiler_choices`, and arrays that it
must not move in `forbidden`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.checks.collectives.compiler_choices import (
    activations,
    between_slices,
    border_permutes,
    exchanges,
    feature_gathers,
    fewest_features,
    ring_permutes,
    splits_sequence,
)
from jaxshard.checks.collectives.expected import Expected, as_travels, common_axes, gather_stages, over_several
from jaxshard.checks.collectives.forbidden import Never, forbidden_arrays
from jaxshard.checks.collectives.owner_exchanges import owner_exchanges
from jaxshard.checks.collectives.parameters import (
    Parameter,
    expert_axes,
    is_stacked,
    longest_dim,
    parameters_of,
    rank_of,
    tensor_axes,
)
from jaxshard.checks.collectives.rounded_weights import rounded_gathers, scale_maxima
from jaxshard.checks.collectives.synchronisation import rows_of_replica, synchronisations
from jaxshard.checks.collectives.weight_uses import Uses, count_scheduled_uses, count_uses
from jaxshard.core.encoded_collectives import list_gather, list_scatter_sum
from jaxshard.core.encoding import shrinks
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, axes_of, only_axes, split_dims, splits_per_dim
from jaxshard.core.tree import bytes_of, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.core.wire import Format
from jaxshard.engines.engine import Engine
from jaxshard.engines.rounded_weights import rounded_weights
from jaxshard.optim.local import inside_replica, local_of

SLACK = 0.01
"""The share of the parameters' bytes that a compiler may move on its own: borders of padded arrays, indices."""


@dataclass(frozen=True)
class Promise:
    """The collectives that a step may issue.

    Attributes:
      expected: the promised collectives, one per array and stage.
      never: the arrays that must never be communicated, however small they are.
      slack: the total bytes of small arrays that the compiler may move without a promise in `expected`.
      mesh: the mesh of the layout; None in promises written by hand.
      names: for each mesh axis that splits activations, the dimension name with which `js.constrain` splits an array
        over it: {"data": "batch", "tensor": "features"}.
    """

    expected: tuple[Expected, ...]
    never: tuple[Never, ...]
    slack: int
    mesh: Mesh | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def promise(layout: Layout, engine: Engine, loss_fn: LossFn, batch: PyTree) -> Promise:
    """Derive the collectives of the step that `make_step(loss_fn, tx, layout, engine=engine)` makes for a batch.

    Under `js.explicit` every collective is promised exactly, except collectives of activations over tensor axes. Under
    `js.auto` the compiler chooses: the promise is an upper bound, and an all-reduce may replace a reduce-scatter.
    Promised are:

    - each weight, all-gathered over the axes that are in its `store` and not in its `use`, as often as the loss uses
      it. Weights of blocks (and of `units`, which are also gathered one at a time) are gathered once more if the
      backward pass needs them;
    - each gradient, reduce-scattered over the batch axes in its `store` and all-reduced over the others; under auto
      once per use of a tied weight;
    - each new parameter, all-gathered over the axes that split only its optimizer state;
    - if the updates of matrices are computed on one device each (`layout.owners`), an all-to-all that sends the inputs
      there, and one that sends the updates back;
    - if sums have a fixed order (`core/ordered_sums.py`), an all-to-all in place of each reduce-scatter, and an
      all-to-all and an all-gather in place of each all-reduce;
    - all-reduces of scalars and metrics. Under explicit also of the model's floating state, and of batch statistics
      that the loss sums by axis name; under auto also of sums over rows that have at most as many elements as the
      longest dimension of a parameter;
    - in a pipeline, permutes of activations over its axis, all-reduces over it of the gradients outside the blocks, and
      the collectives inside a tick at most as often as there are ticks;
    - over the axes of `js.expert`, all-to-alls of tokens and a gather of their counts;
    - over the axes of `js.context`, the exchanges of keys and values in `js.attention`, forward and backward, as often
      as the traced program has them, and in a pipeline as needed;
    - under `js.local`, all of this inside a replica; over the replica axis all-reduces of parameters, flags and array
      metrics; and an all-gather of each parameter that is sharded less than the outer optimizer's state;
    - over other axes that split the `use` of weights (`js.tensor`), all-reduces of activations; if a rule splits the
      sequence, also all-gathers and reduce-scatters of activations. Over these axes it is forbidden to move a weight
      that they split, and logits with the full vocabulary if they split the vocabulary.

    Args:
      layout: the layout of the step.
      engine: the engine that computes the gradient.
      loss_fn: the loss; it is traced to count the uses of each weight.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      The promised collectives (`expected`), forbidden arrays (`never`), and the bytes left to the compiler (`slack`).

    Example:
      promised = js.plan.promise(layout, js.explicit(), model.loss, batch_shapes)
      sum(one.bytes or 0 for one in promised.expected)      # bytes of unscattered arrays, per step and device
    """
    if (local := local_of(layout.strategy)) is not None:
        one = inside_replica(layout)
        inside = promise(one, engine, loss_fn, rows_of_replica(layout, local, batch))
        between = over_several(layout.mesh, synchronisations(layout, local, inside.expected))
        return replace(inside, expected=(*inside.expected, *between))
    passes = engine.block_passes(layout)
    if passes is None:
        uses = count_uses(layout, engine, loss_fn, batch)
    else:
        uses = count_scheduled_uses(layout, passes, loss_fn, batch)
    step = _Step(layout, engine, uses, passes is not None, engine.sums(layout).in_order)
    parameters = parameters_of(layout)
    expected = [
        *(one for parameter in parameters for one in _weight_gathers(step, parameter)),
        *(one for parameter in parameters for one in _gradient_reductions(step, parameter)),
        *(one for parameter in parameters for one in _optimizer_gathers(layout, parameter)),
        *owner_exchanges(layout),
        *_state_collectives(step),
        *_metric_sums(step),
        *_stage_permutes(step),
        *_exchanges_of_the_loss(step),
        *_norm_gathers(step),
        *feature_gathers(layout, parameters, engine.compute_dtype),
        *activations(layout, engine.compiler_chooses),
        *exchanges(layout),
    ]
    total = sum(bytes_of(one.shape, one.dtype) for one in parameters)
    expected = list(between_slices(layout.mesh, [*over_several(layout.mesh, expected), *_scalars(step)]))
    never = forbidden_arrays(layout.mesh, parameters, expert_axes(layout))
    names = dict.fromkeys(tensor_axes(layout), "features") | dict.fromkeys(layout.batch_axes, "batch")
    names |= dict.fromkeys(layout.context.axis if layout.context else (), "context")
    return Promise(tuple(expected), tuple(never), int(SLACK * total), layout.mesh, names)


class _Step(NamedTuple):
    """The training step whose collectives are derived.

    Attributes:
      layout: the layout of the step.
      engine: the engine that computes the gradient.
      uses: how often the step gathers each weight and reduces each gradient.
      scheduled: True if the engine runs a pipeline schedule; then the numbers in `uses` are upper bounds.
      sums_in_order: True if all sums over devices are in a fixed order (`core/ordered_sums.py`).
    """

    layout: Layout
    engine: Engine
    uses: Uses
    scheduled: bool
    sums_in_order: bool


def _weight_gathers(step: _Step, parameter: Parameter) -> Iterator[Expected]:
    """Yield the all-gathers that make one weight, as the loss uses it, from its stored shards."""
    dtype, engine = parameter.dtype, step.engine
    wire = engine.gather_dtype if jnp.issubdtype(dtype, jnp.floating) and not engine.gathers_rounded else None
    rounded = rounded_weights(step.layout).get(parameter.path) if engine.gathers_rounded else None
    if rounded is not None:
        yield from scale_maxima(step.layout.mesh, parameter, rounded)
    if wire is not None and not isinstance(wire, Format):  # the bits are sent as integers
        dtype = jnp.dtype(f"uint{8 * jnp.dtype(wire).itemsize}")
    elif wire is None and engine.compute_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype(engine.compute_dtype)
    for shape, most in step.uses.of("weight", parameter.path):
        param = _part_of(parameter.param, shape)
        if engine.compiler_chooses:
            least = 0
        elif param != parameter.param or engine.microbatches == 1:
            least = 0 if step.scheduled else most  # the slots of a schedule's ticks are conditional
        else:
            least = 1  # the weight is the same for each micro-batch: the compiler may gather it once, before the loop
        one = Expected("all-gather", (), (), dtype, least, most, f"weight {parameter.path}")
        mesh, keep = step.layout.mesh, axes_of(param.use)
        shard = param.shard_shape(mesh)
        if rounded is not None:
            yield from rounded_gathers(mesh, param, keep, one, rounded, stack=len(parameter.shape) - len(shape))
        elif isinstance(wire, Format) and shrinks(wire, math.prod(shard), parameter.dtype):
            yield from as_travels(one, list_gather(shard, param.store, mesh.shape, wire, keep=keep))
        else:
            yield from gather_stages(mesh, param, keep, one, engine.compiler_chooses)


def _part_of(placement: Placement, shape: tuple[int, ...]) -> Placement:
    """Return the placement of a part of an array, from the placement of the full array.

    `shape` is the shape of the part: the full array, one block of a stack (one dimension less), or some columns of a
    matrix.
    """
    if len(shape) < len(placement.view.logical):
        return placement.drop_first()
    for dim, size in enumerate(shape):
        if size != placement.view.logical[dim]:
            placement = placement.resize(dim, size)
    return placement


def _gradient_reductions(step: _Step, parameter: Parameter) -> Iterator[Expected]:
    """Yield the reductions of one gradient over devices: after each use of its weight, or once at the end."""
    grad = parameter.grad
    if grad is None:
        return
    at_end = step.engine.scatter == "end"
    uses = [(parameter.shape, 1)] if at_end else step.uses.of("gradient", parameter.path)
    for shape, count in uses:
        part = grad if at_end else _part_of(grad, shape)
        stages = list(_reduce_stages(step, parameter, part, count))
        yield from stages
        if step.engine.compiler_chooses and part == grad:
            # Of a tied weight the compiler may sum the gradient of each use over devices, then add both.
            yield from (replace(one, what=f"{one.what}, of another use", instead_of=one.name) for one in stages)


def _reduce_stages(step: _Step, parameter: Parameter, grad: Placement, count: int) -> Iterator[Expected]:
    """Yield the collectives, one after the other, that reduce one gradient over devices, `count` times per step.

    First the gradient is reduce-scattered over each batch axis that splits its stored array, and sliced along all other
    axes that split its stored array. So its shape shrinks from collective to collective. Then it is all-reduced over
    the remaining batch axes. `grad` is the placement of the full gradient or of one block's gradient.
    """
    layout, mesh, compiler_chooses = step.layout, step.layout.mesh, step.engine.compiler_chooses
    owned = axes_of(parameter.param.use)
    is_slice = len(grad.view.logical) < len(parameter.shape)
    row_axes = layout.sum_axes if is_stacked(parameter.path) else step.engine.row_axes(layout)
    free = tuple(axis for axis in row_axes if axis not in owned)
    parts = splits_per_dim(mesh, only_axes(grad.store, owned))
    shape = [size // part for size, part in zip(grad.view.stored, parts)]
    wire = step.engine.reduce_dtype
    one = Expected(
        kind="all-to-all" if step.sums_in_order else "reduce-scatter",
        axes=(),
        shape=tuple(shape),
        dtype=wire or parameter.dtype,
        least=0 if compiler_chooses else count,
        most=count,
        what=f"gradient of {parameter.path}",
        unpadded=math.prod(grad.view.logical) // math.prod(parts) if compiler_chooses else None,
        stack=parameter.shape[0] if is_slice else 1,
    )
    if isinstance(wire, Format):
        travels = list_scatter_sum(tuple(shape), parameter.dtype, grad.store, free, mesh.shape, wire, keep=owned)
        yield from as_travels(one, travels)
        return
    split = [(dim, axis) for dim, axis in split_dims(grad.store) if axis not in owned]
    for dim, group in itertools.groupby(split, key=lambda one: one[0]):
        axes = tuple(axis for _, axis in group)
        # Over several axes that split one dimension a compiler may also scatter at once.
        if compiler_chooses and len(axes) > 1 and set(axes) <= set(free):
            at_once = replace(one, axes=axes, shape=tuple(shape), instead_of=one.what)
            yield from _scatters(step, at_once, dim)
        for axis in axes:
            if axis in free:
                yield from _scatters(step, replace(one, axes=(axis,), shape=tuple(shape)), dim)
            shape[dim] //= mesh.shape[axis]
    rest = tuple(axis for axis in free if axis not in [name for _, name in split])
    summed = replace(one, kind="all-reduce", axes=rest, shape=tuple(shape))
    if rank_of(parameter.path, parameter.shape) == 1:
        summed = replace(summed, unpadded=fewest_features(layout, math.prod(shape)))
    yield from _sum_stages(step, summed)
    # A compiler may also sum everything over everything at once, before it splits.
    if compiler_chooses and split and len(free) > 1:
        yield replace(one, kind="all-reduce", axes=free, instead_of=one.what)
    if compiler_chooses and splits_sequence(layout):
        yield replace(one, kind="all-reduce", axes=(*free, *tensor_axes(layout)), instead_of=one.what)


def _scatters(step: _Step, one: Expected, dim: int) -> Iterator[Expected]:
    """Yield the reduce-scatter `one` along dimension `dim`, and the permutes that a TPU adds to it or uses instead."""
    assert one.shape is not None
    mesh, count = step.layout.mesh, axis_size(step.layout.mesh, one.axes)
    shard = tuple(size // count if at == dim else size for at, size in enumerate(one.shape))
    yield one
    if mesh.devices.flat[0].platform == "tpu":
        yield border_permutes(one, shard)
        if step.engine.compiler_chooses:
            yield ring_permutes(one, shard, count)


def _sum_stages(step: _Step, one: Expected) -> Iterator[Expected]:
    """Yield the all-reduce `one`; if sums have a fixed order, yield the collectives that replace it instead.

    `core.ordered_sums.all_sum` replaces it by an all-to-all and an all-gather of the flattened, padded array. If
    the array has fewer elements than there are devices, a single all-gather of all devices' arrays replaces it.
    """
    count, size = axis_size(step.layout.mesh, one.axes), math.prod(one.shape or ())
    if not step.sums_in_order or not jnp.issubdtype(one.dtype, jnp.inexact):
        yield one
    elif size < count:
        yield replace(one, kind="all-gather", shape=(count, size), unpadded=None)
    else:
        flat = replace(one, shape=(size + -size % count,), unpadded=None)
        yield replace(flat, kind="all-to-all")
        yield replace(flat, kind="all-gather")


def _optimizer_gathers(layout: Layout, parameter: Parameter) -> Iterator[Expected]:
    """Yield the all-gathers of one parameter and its gradient before the optimizer's update, and of the result after.

    A parameter or gradient is gathered only over axes that do not split the optimizer state in the same way. If the
    state is split further, the array is sliced, which needs no collective. So under ZeRO-1 only the new parameter is
    gathered.
    """
    path, param, grad, opt = parameter.path, parameter.param, parameter.grad, parameter.opt
    if grad is None or opt is None:
        return
    moves = [
        (param, opt, f"parameter {path} for the optimizer"),
        (grad, opt, f"gradient of {path} for the optimizer"),
        (opt, param, f"new parameter {path}"),
    ]
    for old, new, what in moves:
        one = Expected("all-gather", (), (), parameter.dtype, 1, 1, what)
        yield from gather_stages(layout.mesh, old, common_axes(old, new), one)


def _state_collectives(step: _Step) -> Iterator[Expected]:
    """Yield the all-gathers of the model's stored state, and the all-reduces that combine the new state of devices."""
    arrays = jax.tree_util.tree_leaves_with_path(step.layout.shapes.state)
    for (path, x), placement in zip(arrays, jax.tree.leaves(step.layout.state), strict=True):
        one = Expected("all-gather", (), tuple(x.shape), x.dtype, 0, 1, f"state {path_str(path)}")
        yield from gather_stages(step.layout.mesh, placement, axes_of(placement.use), one)
    for name, x in () if step.engine.compiler_chooses else step.uses.states:
        one = Expected("all-reduce", step.layout.sum_axes, tuple(x.shape), x.dtype, 0, 1, f"state {name}")
        yield from _sum_stages(step, replace(one, unpadded=fewest_features(step.layout, x.size)))


def _metric_sums(step: _Step) -> Iterator[Expected]:
    """Yield the all-reduces of metrics that are arrays, over the mesh axes along which devices have different rows."""
    axes, least = step.engine.row_axes(step.layout), 0 if step.engine.compiler_chooses else 1
    for name, metric in step.uses.metrics.items():
        for x in jax.tree.leaves(metric):
            if x.size > 1:
                one = Expected("all-reduce", axes, tuple(x.shape), x.dtype, least, 1, f"metric {name}")
                yield from _sum_stages(step, one)


def _stage_permutes(step: _Step) -> Iterator[Expected]:
    """Yield the permutes of activations between the stages of a pipeline, its embedding and its head."""
    axes = tuple(set(step.engine.row_axes(step.layout)) - set(step.layout.sum_axes))
    yield Expected("collective-permute", axes, None, None, 0, None, "activations and their cotangents between stages")


def _exchanges_of_the_loss(step: _Step) -> Iterator[Expected]:
    """Yield the collectives that the loss itself issues: exchanges of `js.attention`, and sums by mesh axis name.

    `js.attention` exchanges keys and values under `js.context`. A sum by axis name, such as that of
    `nn.BatchNorm(axis_name="data")`, is promised if it is small enough for batch statistics, a mean and a mean of
    squares per feature: at most twice as many elements as the longest dimension of any parameter.
    """
    context, rows, most = step.layout.context, set(step.layout.sum_axes), 2 * longest_dim(step.layout)
    what = "queries, keys and values, or their gradients, of js.attention"
    if context is not None and step.scheduled:
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
            yield Expected(kind, context.axis, None, None, 0, None, what)
    for one, count in step.uses.exchanges.items():
        if one.kind != "all-reduce" and context is not None:
            # The compiler may join equal exchanges of a block, or move one that is the same in each block out of the
            # loop.
            yield Expected(*one, 0, count, what)
        elif one.kind == "all-reduce" and set(one.axes) <= rows and math.prod(one.shape) <= most:
            yield Expected(*one, 0, count, "sums over rows that the loss takes by axis name")


def _norm_gathers(step: _Step) -> Iterator[Expected]:
    """Yield the all-gathers for the global norms of gradients and updates, if sums have a fixed order.

    Each device sends the sums of squares of its shards. Without a fixed order a scalar is all-reduced instead.
    """
    if step.sums_in_order:
        for tree, what in (
            (step.layout.grads, "squares of the gradients, for their norm"),
            (step.layout.opt_params, "squares of the updates, for their norm"),
        ):
            placements = jax.tree.leaves(tree)
            axes = tuple({axis for placement in placements for axis in axes_of(placement.store)})
            shape = (axis_size(step.layout.mesh, axes), len(placements))
            if axes:
                yield Expected("all-gather", axes, shape, jnp.float32, 1, 1, what)


def _scalars(step: _Step) -> Iterator[Expected]:
    """Yield the all-reduces of scalars over any axes; if sums have a fixed order, also all-gathers of scalars."""
    yield Expected("all-reduce", (), (), None, 0, None, "scalars: loss, weights, metrics, norms, windows of experts")
    if step.sums_in_order:
        each = (step.layout.mesh.size,)
        yield Expected("all-gather", (), each, None, 0, None, "scalars of every device: loss, weights, metrics, sums")
