"""Weights just in time: a stored parameter becomes a weight where it is used, its gradient is reduced where it is born.

An engine says how one weight is gathered and how one gradient is reduced; this file puts both around the user's
function. A gradient rests in another place than its parameter (whole parameters with split gradients are ZeRO-2),
which the cotangent of a parameter cannot do. So every weight is `use(stored, sink)`: its cotangent, reduced, is that
of the `sink`, an array of zeros with the gradient's stored shape, and engines differentiate with respect to the
sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.adapt.closure import check_closure
from jaxshard.adapt.stacked import RematPolicy, Stacked, checkpoint_body, saved, stacked_of
from jaxshard.adapt.units import Pending, Units, adapted_of
from jaxshard.core.constrain import constraining
from jaxshard.core.keys import advance
from jaxshard.core.layout import Layout, join_model
from jaxshard.core.loss import Loss, as_loss
from jaxshard.core.placement import Placement
from jaxshard.core.tree import BLOCKS, map_with_path, path_str, raise_all
from jaxshard.core.types import LossFn, PyTree

Scatter = Literal["each", "end"]


class Move(NamedTuple):
    """How an engine moves one weight: `gather(stored) -> weight` and `reduce(cotangent of the weight) -> gradient`."""

    gather: Callable[[jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]


MakeMove = Callable[[Placement, Placement | None], Move]
"""Makes the move of one weight from the placements of the parameter and of its gradient (None: frozen)."""


def use(move: Move, stored: jax.Array, sink: jax.Array | None) -> jax.Array:
    """The weight of a stored parameter; its reduced cotangent flows to the sink (none: the parameter is frozen)."""
    if sink is None:
        return jax.lax.stop_gradient(move.gather(stored))
    zeros = partial(jnp.zeros, stored.shape, stored.dtype)

    @jax.custom_vjp
    def weight(stored: jax.Array, sink: jax.Array) -> jax.Array:
        return move.gather(stored)

    def forward(stored: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
        return move.gather(stored), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Back in the parameter's dtype first: a weight computed in bf16 is not thereby reduced in bf16.
        return zeros(), move.reduce(cotangent.astype(sink.dtype)).astype(sink.dtype)

    weight.defvjp(forward, backward)
    return weight(stored, sink)


def use_tree(make_move: MakeMove, params: PyTree, grads: PyTree, stored: PyTree, sinks: PyTree) -> PyTree:
    """The weights of a tree; `params` and `grads` are its placements, None in `grads` and `sinks` where frozen."""
    return jax.tree.map(lambda p, g, x, sink: use(make_move(p, g), x, sink), params, grads, stored, sinks)


Call = Callable[[PyTree, PyTree, PyTree, PyTree, Any, Any], Loss]


def make_call(loss_fn: LossFn, layout: Layout, make_move: MakeMove, remat: RematPolicy, units: Units = ()) -> Call:
    """`call(stored, sinks, state, batch, key, row) -> Loss`: the user's loss on just-in-time weights.

    `row` is the global number of the batch's first row. The loss of a `Stacked` model is looked into: each block's
    weights are gathered inside the scan body, and again in the backward pass; so is that of `js.linen` and `js.nnx`
    where `units` are given. All others have their weights gathered at once.
    """
    stacked, adapted = stacked_of(loss_fn), adapted_of(loss_fn)
    check_closure(loss_fn if adapted is None else adapted.loss_fn, layout.mesh)
    if units:
        return _make_units_call(loss_fn, layout, make_move, remat, units)
    if stacked is not None:
        return _make_stacked_call(stacked, layout, make_move, remat)

    def call(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: jax.Array, row: Any) -> Loss:
        weights = use_tree(make_move, layout.params, layout.grads, stored, sinks)
        with users_code(layout):
            return as_loss(loss_fn(join_model(weights, state), batch, advance(key, row)))

    return call


@contextmanager
def users_code(layout: Layout) -> Iterator[None]:
    """A context for the user's functions: constraints follow the layout, and unknown axis names are explained."""
    with constraining(layout):
        try:
            yield
        except NameError as error:
            if "axis name" not in str(error):
                raise
            axes = ", ".join(map(repr, layout.batch_axes)) or "of which there are none"
            raise ValueError(
                f"the loss names an axis that it does not run over ({error}). Under js.auto() it sees the whole batch: "
                "make the module without axis_name, and BatchNorm takes the statistics of all rows. Under js.explicit()"
                f" name the axes of the batch: {axes}"
            ) from error


def _make_units_call(loss_fn: LossFn, layout: Layout, make_move: MakeMove, remat: RematPolicy, units: Units) -> Call:
    adapted = adapted_of(loss_fn)
    if adapted is None:
        fix = "it gathers block by block without" if stacked_of(loss_fn) else "make it with js.linen or js.nnx"
        raise TypeError(f"units: {getattr(loss_fn, '__qualname__', loss_fn)} has no units to look into; {fix}")
    pending = adapted.unit_params(units, layout.shapes.params)

    def weight(late: bool, param: Placement, grad: Placement | None, stored: jax.Array, sink: Any) -> Any:
        get = partial(use, make_move(param, grad))
        return Pending(stored, sink, get) if late else get(stored, sink)

    def call(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: jax.Array, row: Any) -> Loss:
        weights = jax.tree.map(weight, pending, layout.params, layout.grads, stored, sinks)
        with users_code(layout):
            model = join_model(weights, state)
            return as_loss(adapted.run(model, batch, advance(key, row), units=units, save=saved(remat)))

    return call


def _make_stacked_call(stacked: Stacked, layout: Layout, make_move: MakeMove, remat: RematPolicy) -> Call:
    check_stacked(layout)
    params_tail, grads_tail = (_tails(tree[BLOCKS]) for tree in (layout.params, layout.grads))

    def fetch(pair: tuple[PyTree, PyTree]) -> PyTree:
        return use_tree(make_move, params_tail, grads_tail, *pair)

    def call(stored: PyTree, sinks: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None, row: Any) -> Loss:
        del state  # a Stacked model has none
        rest = use_tree(make_move, *map(without_blocks, (layout.params, layout.grads, stored, sinks)))
        params = rest | {BLOCKS: (stored[BLOCKS], sinks[BLOCKS])}
        wrap = partial(checkpoint_body, remat)
        with users_code(layout):
            return as_loss(stacked.run(params, batch, key, fetch=fetch, remat=wrap, row=row))

    return call


def check_stacked(layout: Layout) -> None:
    """Raises if a layout moves or splits the stacked dimension, which the scan over blocks needs whole."""
    problems: list[str] = []

    def check(path: Any, placement: Placement) -> None:
        if placement.store[0] is not None or placement.view.stored[0] != placement.view.logical[0]:
            problems.append(f"{BLOCKS}/{path_str(path)}: dim 0 of {list(placement.view.logical)} is split or padded")

    if layout.pipeline is not None:
        raise ValueError(
            f"the layout places blocks in a pipeline over {layout.pipeline.axis!r}, which this engine does not run: "
            "use engine=js.pipelined(microbatches=...), or take js.pipeline out of the strategy"
        )
    if BLOCKS not in layout.params:
        raise ValueError(f'the layout has no "{BLOCKS}": make it with the init method of the same js.Stacked model')
    map_with_path(check, layout.params[BLOCKS])
    map_with_path(check, layout.grads[BLOCKS])
    raise_all(
        problems,
        ValueError,
        "the layout does not know which dimension stacks the blocks; pass the method model.init itself to js.layout, "
        "not a function that calls it",
    )


def _tails(placements: PyTree) -> PyTree:
    return jax.tree.map(lambda placement: placement.tail(), placements)


def without_blocks(tree: PyTree) -> PyTree:
    """The parameters that are not stacked."""
    return {name: part for name, part in tree.items() if name != BLOCKS}


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Floating arrays in the given dtype; others, and everything where it is None, as they are."""
    return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
