"""How often a step uses each weight and makes each gradient: counted in the traced program, without compiling it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jaxshard.core.jaxpr import eliminate_dead_code, open_jaxpr
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement
from jaxshard.core.tree import map_with_path, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import Engine, value_and_grad
from jaxshard.engines.auto import Auto
from jaxshard.engines.explicit import manual_axes
from jaxshard.engines.just_in_time import Move, make_call

# Called what it stands for, so that no policy of `jax.checkpoint` saves it: the backward pass gathers again.
_mark = Primitive("all_gather")
_mark.def_abstract_eval(lambda x, **_: x)


class Use(NamedTuple):
    """A weight gathered ("weight") or its gradient reduced ("gradient"), whole or one slice of a stack of blocks."""

    what: str
    path: str
    sliced: bool


class Uses(NamedTuple):
    """How often each use happens in a step, and the shapes of the metrics that the loss reports, by name."""

    counts: dict[Use, int]
    metrics: dict[str, PyTree]


def uses(layout: Layout, engine: Engine, loss_fn: LossFn, batch: PyTree) -> Uses:
    """What a step does with weights, loops counted by their turns; what no result needs is left out.

    `batch` is a tree of global arrays or their shapes. Both branches of a conditional count, and a loop whose number of
    turns is unknown counts once.
    """
    named = replace(layout, params=map_with_path(lambda path, p: replace(p, rule=path_str(path)), layout.params))
    ranks = {path_str(path): x.ndim for path, x in jax.tree_util.tree_leaves_with_path(layout.shapes.params)}

    def make_move(param: Placement, grad: Placement | None) -> Move:
        sliced = len(param.view.logical) < ranks[param.rule]

        def gather(stored: jax.Array) -> jax.Array:
            marked: jax.Array = _mark.bind(stored, use=Use("weight", param.rule, sliced))
            return param.view.invert(marked)

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None
            return grad.view.apply(_mark.bind(cotangent, use=Use("gradient", param.rule, sliced)))

        return Move(gather, reduce)

    call = make_call(loss_fn, named, make_move, engine.remat, tuple(engine.units))

    def step(stored: PyTree, sinks: PyTree, state: PyTree, turns: PyTree, key: jax.Array) -> Any:
        return value_and_grad(
            lambda sinks, state, rows, row: call(stored, sinks, state, rows, key, row),
            sinks, state, turns, jnp.arange(engine.microbatches), total=lambda x: x,
        )  # fmt: skip

    manual = set() if isinstance(engine, Auto) else manual_axes(layout)
    if manual:  # what one device runs: the user's code may name axes
        mesh, whole = layout.mesh, PartitionSpec()
        step = jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=manual, check_vma=False)
    parts = axis_size(layout.mesh, layout.batch_axes) if manual else 1

    def rows(x: Any) -> jax.ShapeDtypeStruct:
        size = (x.shape[0] // (parts * engine.microbatches), *x.shape[1:]) if x.ndim else ()
        return jax.ShapeDtypeStruct((engine.microbatches, *size), x.dtype)

    def stored(x: Any, placement: Placement | None) -> jax.ShapeDtypeStruct | None:
        return None if placement is None else jax.ShapeDtypeStruct(placement.view.stored, x.dtype)

    shapes = layout.shapes
    params, sinks = (jax.tree.map(stored, shapes.params, placements) for placements in (layout.params, layout.grads))
    traced, (outcome, _) = jax.make_jaxpr(step, return_shape=True)(
        params, sinks, shapes.state, jax.tree.map(rows, batch), shapes.key
    )
    found: dict[Use, int] = {}
    for use, times in _marks(eliminate_dead_code(traced)[0], 1):
        found[use] = found.get(use, 0) + times
    return Uses(found, outcome.metrics)


def _marks(jaxpr: Any, times: int) -> Iterator[tuple[Use, int]]:
    for equation in jaxpr.eqns:
        if equation.primitive is _mark:
            yield equation.params["use"], times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                program, _ = open_jaxpr(inner)
                if hasattr(program, "eqns"):
                    yield from _marks(program, times * turns)
