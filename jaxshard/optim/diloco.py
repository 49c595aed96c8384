"""`diloco`: an optimizer whose replicas are synchronised every so many steps, for a user's own `shard_map` loop.

`js.local` does the same in `js.make_step`, where it needs no transform. Here the parameters are each replica's own,
and the state holds the shared ones:

    inner step       every step, on the replica's own gradients; nothing moves
    outer step       every `every`-th: the mean of the replicas (one all-reduce), the outer optimizer, back to all
    warm-up          the first steps: the mean of the replicas' gradients goes to the inner optimizer, nothing else
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.core.collectives import sum_scalar
from jaxshard.core.compat import varying_axes
from jaxshard.core.fragments import Cut, Fragment, cut_fragments, of_fragment, put_fragment
from jaxshard.core.local import average, check_counts, due
from jaxshard.core.mesh import axis_names
from jaxshard.core.transform import as_transform
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.parts import types_are_checked


class DilocoState(NamedTuple):
    """The state of `js.optim.diloco`.

    Attributes:
      steps: int32[], the number of steps taken.
      shared: the parameters that all replicas had after the last synchronisation; equal on all of them.
      inner: the state of the inner optimizer, each replica's own.
      outer: the state of the outer optimizer for each fragment; equal on all replicas.

    Example:
        state = jax.eval_shape(js.optim.diloco(optax.adamw(3e-4), every=32).init, params)
        state.shared        # what to evaluate and save
    """

    steps: jax.Array
    shared: Any
    inner: Any
    outer: tuple[Any, ...]


def diloco(
    tx: optax.GradientTransformation,
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    fragments: int = 1,
    warmup: int = 0,
    axis_name: AxisName = "replica",
) -> optax.GradientTransformationExtraArgs:
    """Take ordinary steps on each replica and synchronise their parameters every so many, inside `shard_map`.

    Updates enter as a replica's gradients (already reduced over the axes inside it) and leave such that
    `optax.apply_updates` gives its own new parameters: those of `tx`, and in a step that synchronises the new shared
    ones, which differ between replicas by no more than their rounding. Of the shared ones in the state every replica
    has the same bits.

    Per array: one all-reduce over the axis in one step of `every`, in a conditional that the count of steps decides,
    so that all devices take the same branch. In a step of the warm-up one of each gradient, and where `shard_map`
    checks types (`check_vma=True`) one of each parameter too: no other operation tells it that replicas are alike. No
    other collectives of its own.

    Args:
      tx: the inner optimizer, any transform.
      every: the number of steps from one synchronisation to the next.
      outer: the optimizer of the shared parameters, which gets the way from them to the replicas' mean as a gradient.
        None takes optax.sgd(1.0), which averages them, as `js.local` does, which says why; DiLoCo's is
        optax.sgd(0.7, momentum=0.9, nesterov=True).
      fragments: the parameters are synchronised in so many parts of nearly equal bytes, `every / fragments` steps
        apart.
      warmup: in so many steps at the start `tx` is given the mean of the replicas' gradients, so that replicas stay
        alike, as under data parallelism; `outer` is not used. The mean weighs replicas alike: where their rows weigh
        differently, divide a replica's total by the mean weight of all replicas there.
      axis_name: the mesh axis of the replicas, or a tuple of axes.

    Returns:
      A transform whose `update` belongs inside `shard_map` over the axis and needs `params`. Its `init` takes the
      parameters with which all replicas begin. Parameters and `inner` differ between replicas, `steps`, `shared` and
      `outer` do not.

    Raises (from this function and from update):
      ValueError: `every`, `fragments` or `warmup` is no whole number in range, or there are more fragments than
        steps or pieces of the model; `update` without `params`, or outside `shard_map` over the axis, as in
        `js.make_step`, where `js.local` is meant; gradients that were summed over the axis of the
        replicas.
      TypeError: `tx` or `outer` is no optax transform.

    Source:
      Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1.

    Example:
        tx = js.optim.diloco(optax.adamw(3e-4), every=32)

        def step(params, opt_state, rows):                  # of one replica: [1, ...] of what is [replicas, ...]
            grads = jax.grad(local_mean_loss)(params, rows)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state
    """
    check_counts("diloco", every, fragments, warmup)
    inner, axes = as_transform(tx), axis_names(axis_name)
    shared_tx = as_transform(average() if outer is None else outer)

    def init_fn(params: PyTree) -> DilocoState:
        parts = cut_fragments(params, fragments)
        # A copy: a loop may donate parameters and state, and no array can be donated twice.
        shared = jax.tree.map(jnp.array, params)
        states = tuple(shared_tx.init(of_fragment(part, Cut.take, params)) for part in parts)
        return DilocoState(jnp.zeros((), jnp.int32), shared, inner.init(params), states)

    def update_fn(updates: PyTree, state: DilocoState, params: PyTree | None = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("diloco: update needs the replica's parameters; call tx.update(grads, state, params)")
        _check_bound(axes)
        _check_own(updates, axes)
        if warmup:
            updates = lax.cond(
                state.steps < warmup,
                lambda own: _vary(jax.tree.map(partial(_mean, axes=axes), own), axes),
                lambda own: _vary(own, axes),
                updates,
            )
        changes, inner_state = inner.update(updates, state.inner, params, **extra)
        own = optax.apply_updates(params, changes)
        branches = [
            lambda own, shared, outer: (_vary(own, axes), shared, outer),
            *(_make_sync(shared_tx, at, part, axes) for at, part in enumerate(cut_fragments(params, fragments))),
        ]
        branches += [partial(_adopt, axes)] if warmup else []
        index = due(state.steps, every, fragments, warmup)
        synchronised = lax.switch(index, branches, own, state.shared, state.outer)
        own, shared, outer_states = synchronised
        moved = jax.tree.map(lambda new, old: (new - old).astype(old.dtype), own, params)
        return moved, DilocoState(state.steps + 1, shared, inner_state, outer_states)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _make_sync(
    tx: optax.GradientTransformationExtraArgs, at: int, part: Fragment, axes: tuple[str, ...]
) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """Make the function that synchronises one fragment."""

    def sync(own: PyTree, shared: PyTree, outer: tuple[PyTree, ...]) -> tuple[PyTree, PyTree, PyTree]:
        old = of_fragment(part, Cut.take, shared)
        gradient = jax.tree.map(lambda x, mine: x - _mean(mine, axes), old, of_fragment(part, Cut.take, own))
        updates, state = tx.update(gradient, outer[at], old)
        new = optax.apply_updates(old, updates)
        own = put_fragment(part, _vary(new, axes), _vary(own, axes))
        return own, put_fragment(part, new, shared), (*outer[:at], state, *outer[at + 1 :])

    return sync


def _adopt(axes: tuple[str, ...], own: PyTree, shared: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Share what each replica has, which is the same on all."""
    del shared
    mine = _vary(own, axes)
    return mine, jax.tree.map(partial(_mean, axes=axes), mine) if types_are_checked(axes) else own, outer


def _mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return sum_scalar(x, axes) / lax.axis_size(axes)


def _vary(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Give arrays the type of those that differ over the axes, where types are checked."""
    if not types_are_checked(axes):
        return tree

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _check_bound(axes: tuple[str, ...]) -> None:
    try:
        lax.axis_size(axes)
    except NameError as error:
        name = axes[0] if len(axes) == 1 else axes
        raise ValueError(
            f"diloco: update is not inside a jax.shard_map over {name!r}, the axis of the replicas. It is for a loop "
            f"of your own; for js.make_step put js.local({name!r}, every=...) into the strategy of the layout, and "
            "give the inner optimizer alone"
        ) from error


def _check_own(grads: PyTree, axes: tuple[str, ...]) -> None:
    if not types_are_checked(axes):
        return
    if summed := [g for g in jax.tree.leaves(grads) if not set(axes) & set(varying_axes(g))]:
        raise ValueError(
            f"diloco: {len(summed)} gradients do not vary over {', '.join(map(repr, axes))}, so that they are summed "
            "over the replicas already; take each replica's own parameters into shard_map, split over the axis, and "
            "the gradient with respect to these"
        )
