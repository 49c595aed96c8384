"""A step under `js.local`: an ordinary step in each replica, and the outer optimizer step of DiLoCo when it is due.

    in each replica       an ordinary step of the replica's own parameters, on the replica's rows of the batch: no
                          collective over the replicas' axis except the means of a few scalars
    every n-th step       average the parameters over replicas, update the shared parameters by the outer optimizer, and
                          copy them to all replicas
    in the warm-up        all replicas have taken the same step (`warm_up`), so the shared parameters become a copy of
                          any replica's parameters

The last two are branches of a conditional on the step's number, so that all devices take the same branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.collectives import sum_scalar
from jaxshard.core.layout import Layout, put_back, select
from jaxshard.core.placement import Placement, only_axes
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.optim.local import Local, LocalState, inside_replica
from jaxshard.optim.proof.elementwise import check_stored
from jaxshard.training.state import TrainState
from jaxshard.training.views import LOGICAL, STORED, hold_stored, move_stored


def check_engine_for_replicas(engine: Engine, layout: Layout) -> None:
    """Raise ValueError if an engine has ordered sums or residuals, which replicas of `js.local` do not support."""
    if engine.sums(layout).in_order:
        raise ValueError("local: reduction='ordered' is not supported under js.local; use reduction='native'")
    if jax.tree.leaves(engine.residuals(inside_replica(layout))):
        raise ValueError(
            "local: replicas of js.local keep no residuals of gradients; leave feedback out of reduce_dtype"
        )


OrdinaryStep = Callable[[TrainState, PyTree], tuple[TrainState, PyTree]]
"""`step(run, batch) -> (run, results)` of one replica; the results (metrics) are equal on all replicas."""


def take_local_step(
    layout: Layout, local: Local, step: OrdinaryStep, run: TrainState, batch: PyTree
) -> tuple[TrainState, PyTree]:
    """Take one step in every replica, and synchronise the replicas if it is due; traced under jit, in global view.

    Args:
      layout: the layout of the TrainState.
      local: the `js.local` of the layout's strategy.
      step: an ordinary step of one replica's TrainState, traced inside a `shard_map` over the axis of the replicas.
      run: the TrainState of all replicas.
      batch: the global batch; replica r computes the r-th part of its rows.

    Returns:
      (the TrainState after the step, the results of `step`).
    """
    trained, opt_state, one = layout.trainable, run.opt_state, inside_replica(layout)

    def hold(params: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
        # Without this constraint the compiler would choose the sharding over the other axes.
        return hold_stored(one, params, one.params), hold_stored(one, inner, one.opt_state)

    def on_replica(own: PyTree, inner: PyTree, frozen: PyTree, number: Any, key: Any, rows: PyTree) -> Any:
        params, inner = hold(put_back(trained, _first(own), frozen), _first(inner))
        # A different key for each replica, so that their dropout differs.
        key = jax.random.fold_in(key, lax.axis_index(local.axis))
        after, results = step(TrainState(number, params, inner, (), key), rows)
        params, inner = hold(after.params, after.opt_state)
        return _as_rows(select(trained, params)), _as_rows(inner), results

    whole, own = PartitionSpec(), PartitionSpec(local.axis)
    rows = jax.tree.map(lambda placement: only_axes(placement.store, local.axis), layout.batch_placements(batch))
    spread = jax.shard_map(
        on_replica,
        mesh=layout.mesh,
        in_specs=(own, own, whole, whole, whole, rows),
        out_specs=(own, own, whole),
        axis_names=set(local.axis),
        check_vma=False,
    )
    frozen = put_back(trained, jax.tree.map(lambda _: None, opt_state.params), run.params)
    params, inner, results = spread(opt_state.params, opt_state.inner, frozen, run.step, run.key, batch)
    params = hold_stored(layout, params, layout.opt_state.params)
    inner = hold_stored(layout, inner, layout.opt_state.inner)
    params, shared, outer = _synchronise(layout, local, run, params)
    after = TrainState(
        run.step + 1, put_back(trained, shared, run.params), LocalState(params, inner, (outer,)), (), run.key
    )
    return after, results


def _synchronise(layout: Layout, local: Local, run: TrainState, own: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Run the outer optimizer if replicas synchronise after this step; otherwise return the arrays unchanged.

    After a warm-up step the parameters of all replicas are equal, so copy the parameters of any replica to the shared
    parameters instead.

    Args:
      layout: the layout of the TrainState.
      local: the `js.local` of the layout's strategy.
      run: the TrainState before the step, which has the shared parameters and the outer optimizer's state.
      own: each replica's trained parameters after its ordinary step, [replicas, ...].

    Returns:
      (each replica's parameters, the shared parameters, the outer optimizer's state).
    """
    shared, (outer,) = select(layout.trainable, run.params), run.opt_state.outer

    def nothing(own: PyTree, shared: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return own, shared, outer

    def adopt(own: PyTree, shared: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        del shared
        return own, _of_any_replica(layout, own), outer

    branches = [nothing, _make_sync(layout, local), *([adopt] if local.warmup else [])]
    synchronised: tuple[PyTree, PyTree, PyTree] = lax.switch(local.due(run.step), branches, own, shared, outer)
    return synchronised


def _make_sync(layout: Layout, local: Local) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """Make `sync(own, shared, outer)`, which averages the replicas' parameters and runs the outer optimizer.

    `own` are each replica's parameters, `shared` the parameters after the last synchronisation, `outer` the state of
    the outer optimizer. Its gradient is the shared parameters minus the average. The function returns (the new
    parameters copied to each replica, the new shared parameters, the new state).
    """
    trained, seen, (places,) = layout.trainable, layout.opt_params, layout.opt_state.outer
    stored, shapes = select(trained, layout.params), select(trained, layout.shapes.params)
    # As for the inner optimizer: run on stored arrays if it is proven to give the same result as on logical ones.
    proof = check_stored(local.outer, shapes, seen, places)
    view = STORED if proof is None or proof else LOGICAL

    def sync(own: PyTree, shared: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        old = move_stored(layout, shared, stored, seen)
        mean = _mean_over_replicas(layout, local, own, stored, seen)
        gradient = jax.tree.map(jnp.subtract, view.enter(seen, old), view.enter(seen, mean))
        updates, state = local.outer.update(gradient, view.enter(places, outer), view.enter(seen, old))
        fresh = view.leave(seen, optax.apply_updates(view.enter(seen, old), updates))
        new = move_stored(layout, hold_stored(layout, fresh, seen), seen, stored)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (local.replicas(layout.mesh), *x.shape)), new)
        return hold_stored(layout, copies, layout.opt_state.params), new, view.leave(places, state)

    return sync


def _mean_over_replicas(layout: Layout, local: Local, own: PyTree, stored: PyTree, seen: PyTree) -> PyTree:
    """Average the replicas' parameters by one all-reduce of each device's shard, adding bf16 and f16 in f32.

    Args:
      layout: the layout of the TrainState.
      local: the `js.local` of the layout's strategy.
      own: each replica's trained parameters, [replicas, ...].
      stored: the placements in which the shared parameters are stored.
      seen: the placements of the result, in which the outer optimizer receives the parameters.
    """

    def lift(placement: Placement) -> Placement:
        return local.lift(placement, layout.mesh)

    # Take the sharding of the outer optimizer's state, which may split arrays further (ZeRO-1 and 2).
    lifted = jax.tree.map(lift, seen)
    own = move_stored(layout, own, jax.tree.map(lift, stored), lifted)

    def mean(own: PyTree) -> PyTree:
        return jax.tree.map(lambda x: sum_scalar(x[0], local.axis) / local.replicas(layout.mesh), own)

    def specs(placements: PyTree) -> PyTree:
        return jax.tree.map(lambda placement: placement.store, placements)

    averaged: PyTree = jax.shard_map(
        mean, mesh=layout.mesh, in_specs=(specs(lifted),), out_specs=specs(seen), check_vma=False
    )(own)
    return averaged


def _of_any_replica(layout: Layout, own: PyTree) -> PyTree:
    """Return the parameters of one replica, without communication. All replicas must have equal parameters.

    Every device takes its own shard of its own replica's parameters.
    """

    def specs(placements: PyTree) -> PyTree:
        return jax.tree.map(lambda placement: placement.store, placements)

    stored = select(layout.trainable, layout.params)
    taken: PyTree = jax.shard_map(
        _first, mesh=layout.mesh, in_specs=(specs(layout.opt_state.params),), out_specs=specs(stored), check_vma=False
    )(own)
    return taken


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _as_rows(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)
