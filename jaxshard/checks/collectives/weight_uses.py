"""Count how often a step gathers each weight and reduces each gradient, from the traced program.

The loss is traced as the engine runs it, with the engine's gather and reduction of a weight replaced by marks, identity
operations that can be counted in the jaxpr:

    engine:  stored  --all_gather-->      weight       cotangent  --psum_scatter-->  gradient
    here:    stored  --mark(weight w)-->  weight       cotangent  --mark(grad w)-->  gradient

Then the marks that are left after dead code elimination are counted, a mark in the body of a scan once per iteration.
So recomputation, blocks, units, tied and unused weights count as they do in the compiled step. The collectives by which
`js.attention` exchanges keys and values under `js.context` are in the traced program, and are counted in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxprs_in_params
from jax.sharding import PartitionSpec

from jaxshard.adapt.objective import resolve
from jaxshard.core.jaxpr import eliminate_dead_code
from jaxshard.core.layout import Layout
from jaxshard.core.loss import as_loss
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import Placement
from jaxshard.core.tree import BLOCKS, map_with_path, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import accumulate
from jaxshard.engines.context import prepare, split_shapes
from jaxshard.engines.engine import BlockPasses, Engine
from jaxshard.engines.just_in_time import MakeMove, Move, cast_floats
from jaxshard.engines.manual import used_shape
from jaxshard.engines.part import Cut
from jaxshard.layers.attention.attention import SCOPE

# Has the name of a gather, so that no policy of `jax.checkpoint` saves its result: the backward pass gathers again.
_mark = Primitive("all_gather")
_mark.def_abstract_eval(lambda x, **_: x)


class Use(NamedTuple):
    """One gather of a parameter, or one reduction of its gradient.

    Attributes:
      what: "weight" for a gather, "gradient" for a reduction.
      path: the path of the parameter.
      shape: the shape that is moved: of the full array (without padding), of one block of a stack, or of a chunk of
        columns, as in the cross-entropy of a large vocabulary.
    """

    what: str
    path: str
    shape: tuple[int, ...]


class Exchange(NamedTuple):
    """A collective that the loss issues itself: in `js.attention`, or a sum that the user wrote.

    Attributes:
      kind: one of `found.KINDS`.
      axes: the mesh axes.
      shape: the shape of the full, unscattered array.
      dtype: the dtype of the array.
    """

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
}
"""Kinds of collectives by the names of JAX's primitives."""


class Uses(NamedTuple):
    """The number of times that a step gathers each weight and reduces each gradient, and its other communication.

    Attributes:
      counts: how often each use happens in a step.
      metrics: the shapes of the loss's metrics, by name.
      exchanges: how often the loss issues each collective of its own: the exchanges of `js.attention`, and sums by axis
        name (batch statistics).
      states: path and shape of each array of the model's state that is all-reduced over devices.
    """

    counts: Mapping[Use, int]
    metrics: dict[str, PyTree]
    exchanges: Mapping[Exchange, int] = MappingProxyType({})
    states: Sequence[tuple[str, jax.ShapeDtypeStruct]] = ()

    def of(self, what: str, path: str) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (shape, times per step) for each shape in which a parameter is gathered or its gradient reduced.

        Args:
          what: "weight" for gathers, "gradient" for reductions.
          path: the path of the parameter.
        """
        yield from ((use.shape, count) for use, count in self.counts.items() if use[:2] == (what, path))


def count_uses(layout: Layout, engine: Engine, loss_fn: LossFn, batch: PyTree) -> Uses:
    """Count the gathers of weights and the reductions of gradients in a step, by tracing the part of one device.

    All branches of a conditional are counted. The body of a loop whose trip count is not known is counted once.

    Args:
      layout: the layout of the step.
      engine: an engine without a pipeline schedule (`engine.block_passes(layout)` is None).
      loss_fn: the loss.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.
    """
    # `make_move` sees placements alone, so the parameter's path travels in `Placement.rule`, which nothing here reads.
    named = replace(layout, params=map_with_path(lambda path, p: replace(p, rule=path_str(path)), layout.params))
    objective, manual = resolve(loss_fn), engine.manual_axes(layout)
    call = engine.make_call(objective, named, _make_marking_move(layout if manual else None, engine.compute_dtype))

    states = engine.state_rules(objective, layout, batch)

    def step(stored: PyTree, sinks: PyTree, state: PyTree, pieces: PyTree, key: jax.Array) -> Any:
        cut = Cut(pieces, jax.tree.map(lambda _: True, pieces), pieces, jnp.arange(engine.microbatches))
        outcome, grads, _ = accumulate(
            lambda sinks, stored, state, batch, row: call(stored, sinks, state, batch, key, row),
            sinks, stored, state, cut, lambda x: x, None if states is None else lambda part: states,
        )  # fmt: skip
        return outcome, grads

    if manual:  # trace inside a shard_map, because the user's code may name axes
        mesh, spec = layout.mesh, PartitionSpec()
        step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual), check_vma=False)
    parts = axis_size(layout.mesh, layout.batch_axes) if manual else 1
    batch = split_shapes(layout, objective.known, batch) if manual else prepare(layout, objective.known, batch)

    def of_micro_batches(x: Any, has_rows: bool) -> jax.ShapeDtypeStruct:
        rows = (x.shape[0] // (parts * engine.microbatches), *x.shape[1:]) if has_rows else x.shape
        return jax.ShapeDtypeStruct((engine.microbatches, *rows), x.dtype)

    def stored(x: Any, placement: Placement | None) -> jax.ShapeDtypeStruct | None:
        return None if placement is None else jax.ShapeDtypeStruct(placement.view.stored, x.dtype)

    shapes = layout.shapes
    params, sinks = (jax.tree.map(stored, shapes.params, placements) for placements in (layout.params, layout.grads))
    traced, (outcome, _) = jax.make_jaxpr(step, return_shape=True)(
        params, sinks, shapes.state, jax.tree.map(of_micro_batches, batch, layout.rows_mask(batch)), shapes.key
    )
    counts, exchanges = Counter[Use](), Counter[Exchange]()
    _count(eliminate_dead_code(traced)[0], 1, counts, exchanges)
    return Uses(counts, outcome.metrics, exchanges, [] if states is None else states.reduced())


def _make_marking_move(layout: Layout | None, compute_dtype: Any) -> MakeMove:
    """Make the function that makes the `Move` of a parameter, with marks in place of its gather and reduction.

    A `Move` is the engine's pair of functions that gather a stored weight and reduce its gradient. With a `layout` the
    loss is traced as one device runs it, with only that device's experts.
    """

    def make_move(param: Placement, grad: Placement | None) -> Move:
        path, shape = param.rule, param.view.logical
        used = shape if layout is None else used_shape(layout, param)
        is_split = used != shape

        def gather(stored: jax.Array) -> jax.Array:
            marked: jax.Array = _mark.bind(stored, use=Use("weight", path, shape))
            weight = param.view.invert(marked)
            own = weight[tuple(map(slice, used))] if is_split else weight
            return cast_floats(own, compute_dtype)  # in the dtype of the step, in which activations are exchanged

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None
            marked: jax.Array = _mark.bind(cotangent, use=Use("gradient", path, shape))
            full = jnp.pad(marked, [(0, size - part) for size, part in zip(shape, used)]) if is_split else marked
            return grad.view.apply(full)

        return Move(gather, reduce)

    return make_move


def _count(jaxpr: Any, times: int, counts: Counter[Use], exchanges: Counter[Exchange], *, inside: bool = False) -> None:
    """Add the marks of a jaxpr to `counts` and its collectives to `exchanges`, each multiplied by `times`.

    Inside `js.attention` (`inside` is True) all kinds of collectives are counted, elsewhere only `psum`.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        here = inside or SCOPE in str(equation.source_info.name_stack)
        if equation.primitive is _mark:
            counts[params["use"]] += times
        elif name == "psum" or (here and name in _KINDS):
            axes = params["axes"] if name == "psum" else params["axis_name"]
            names = tuple(axis for axis in axis_names(axes) if isinstance(axis, str))
            # The unscattered array is the result of a gather, and the operand of all others.
            for x in equation.outvars if name == "all_gather" else equation.invars:
                exchanges[Exchange(_KINDS[name], names, tuple(x.aval.shape), x.aval.dtype)] += times
        for inner in jaxprs_in_params(params):
            _count(inner, times * (params["length"] if name == "scan" else 1), counts, exchanges, inside=here)


def count_scheduled_uses(layout: Layout, passes: BlockPasses, loss_fn: LossFn, batch: PyTree) -> Uses:
    """Return upper bounds of how often a pipeline schedule gathers weights and reduces gradients.

    Weights outside the blocks, in the embedding and the head, are counted once.

    Args:
      layout: the layout of the step.
      passes: how often the schedule gathers each block and reduces its gradient.
      loss_fn: the loss, which is traced only for the shapes of its metrics.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.
    """
    counts: dict[Use, int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(layout.shapes.params):
        stacked = path[0].key == BLOCKS
        shape = tuple(x.shape[1:] if stacked else x.shape)
        counts[Use("weight", path_str(path), shape)] = passes.gathers if stacked else 1
        counts[Use("gradient", path_str(path), shape)] = passes.reductions if stacked else 1
    loss = jax.eval_shape(lambda *args: as_loss(loss_fn(*args)), layout.shapes.params, batch, layout.shapes.key)
    return Uses(counts, loss.metrics)
