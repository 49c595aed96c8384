"""The optimizer's part of a step: reshard gradients and parameters like its state, update, gather new parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxshard.core.collectives import Sums
from jaxshard.core.jaxpr import Program, assign
from jaxshard.core.layout import Layout, put_back, select
from jaxshard.core.mesh import shares_threads
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.optim.factorizations import one_matrix_at_a_time
from jaxshard.training.extra_args import ExtraArgs, LossAt
from jaxshard.training.non_finite import keep_old_unless, sum_of_squares
from jaxshard.training.opt_state_check import check_opt_state_kept
from jaxshard.training.streamed import update_streamed
from jaxshard.training.views import LOGICAL, STORED, UNCHANGED, View, gather_updated, hold_stored, move_stored

NO_EXTRA_ARGS = ExtraArgs()

OwnedUpdate = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]

Update = Callable[
    [PyTree, PyTree | None, PyTree, PyTree, jax.Array, jax.Array, LossAt], tuple[PyTree, PyTree, jax.Array]
]


def make_update(
    tx: optax.GradientTransformation,
    layout: Layout,
    sums: Sums,
    *,
    stored: bool,
    streamed: bool = False,
    extra: ExtraArgs = NO_EXTRA_ARGS,
    owned: OwnedUpdate | None = None,
) -> Update:
    """Make `update(params, parts, grads, opt_state, ok, loss, loss_at)`, which runs the optimizer on stored arrays.

    The function reshards gradients and trained parameters like their optimizer state, calls `tx.update`, and reshards
    the new parameters to the placements of `layout.params`. `parts` are the trained parameters in the sharding of the
    optimizer state, if the step sliced them before, or None.

    Args:
      tx: an optax transform.
      layout: the layout.
      sums: the functions that sum over devices, in the order that the hardware chooses or in a fixed order.
      stored: True if `tx` runs on the stored arrays; otherwise on logical arrays, unpadded and in model order.
      streamed: True if optimizer state in the host's memory is copied to the device block by block; `tx` must be
        elementwise.
      extra: the extra arguments that `tx` uses. They are made from `loss`, a scalar, and `loss_at(stored parameters) ->
        (loss, stored gradients)`.
      owned: the update in which each matrix is updated by the device that owns it, in place of `tx.update`: it takes
        logical gradients and parameters, and the stored optimizer state. With None, state that owners store is
        converted to logical arrays for the update.

    Returns:
      The function, which returns `(params, opt_state, changes)`, stored arrays. If `ok`, a bool on the device, is
      False, `params` and `opt_state` are the old arrays bit for bit. They are selected before the all-gather of
      parameters, so that the gather can write into the donated array. `changes`, f32[trained parameters], is the sum of
      squares of each parameter's change, or NaN if the update made a finite element infinite or NaN.
    """
    tx = tx if extra.names else as_transform(tx)
    old_params, seen = select(layout.trainable, layout.params), layout.opt_params
    specs = [placement.store for placement in jax.tree.leaves(seen)]
    view = STORED if stored else LOGICAL
    state_view = view
    if layout.carried is not None:
        state_view = View(layout.carried.unstore, layout.carried.store)
    if owned is not None:
        state_view = UNCHANGED
    elif streamed:
        state_view = View(UNCHANGED.enter, STORED.leave)

    def to_optimizer(tree: PyTree, placements: PyTree) -> PyTree:
        """Reshard stored parameters or gradients like the optimizer state.

        `placements` says how the arrays are stored. This is a slice if the state is split over more mesh axes (ZeRO).
        """
        return view.enter(seen, move_stored(layout, tree, placements, seen))

    def from_optimizer(tree: PyTree) -> PyTree:
        """Convert parameters as the optimizer returns them to stored arrays, still sharded like the optimizer state."""
        return hold_stored(layout, view.leave(seen, tree), seen)

    def update(
        params: PyTree,
        parts: PyTree | None,
        grads: PyTree,
        opt_state: PyTree,
        ok: jax.Array,
        loss: jax.Array,
        loss_at: LossAt,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        def seen_loss_at(at: PyTree) -> tuple[jax.Array, PyTree]:
            at = jax.tree.map(lambda x, like: x.astype(like.dtype), at, chosen)  # an optimizer may keep them in f32
            at = move_stored(layout, from_optimizer(at), seen, old_params)
            loss, grads = loss_at(put_back(layout.trainable, at, params))
            return loss, to_optimizer(grads, layout.grads)

        trained, placed = (select(layout.trainable, params), old_params) if parts is None else (parts, seen)
        chosen = to_optimizer(trained, placed)
        grads = to_optimizer(grads, layout.grads)
        old_state = state_view.enter(layout.opt_state, opt_state)
        if streamed:
            check_opt_state_kept(layout, old_state, jax.eval_shape(tx.update, *abstract((grads, old_state, chosen)))[1])
            updates, new_state = update_streamed(tx, ok, grads, old_state, chosen, layout.opt_state)
        elif owned is None and not extra.names:
            updates, new_state = _update_with_kept_state(tx, ok, grads, old_state, chosen, layout)
        else:
            run = owned or partial(tx.update, **extra.make(grads, loss, seen_loss_at))
            updates, new_state = run(grads, old_state, chosen)
            check_opt_state_kept(layout, old_state, new_state)
            new_state = keep_old_unless(ok, new_state, old_state)
        # Select before the all-gather (see above); `hold_stored` keeps the compiler from gathering both first.
        new = keep_old_unless(ok, optax.apply_updates(chosen, updates), chosen)
        # Computed from the values that are written anyway, so that parameters are read once.
        steps = [_subtract(*pair) for pair in zip(jax.tree.leaves(new), jax.tree.leaves(chosen), strict=True)]
        changes = sums.stack_totals(sum_of_squares, steps, specs, layout.mesh)
        # All-gather parameters that are split over fewer axes than their optimizer state.
        fresh = gather_updated(layout, from_optimizer(new), seen, old_params)
        return put_back(layout.trainable, fresh, params), state_view.leave(layout.opt_state, new_state), changes

    return update


def _update_with_kept_state(
    tx: optax.GradientTransformation, ok: jax.Array, grads: PyTree, old_state: PyTree, params: PyTree, layout: Layout
) -> tuple[PyTree, PyTree]:
    """Run `tx.update`; unless `ok`, keep the old optimizer state, by a selection right after each new array.

    Return (updates, new state); the updates of a bad step are not used.

    If the selection came after all of `tx.update`, the compiled program would keep two values of each new moment
    (`mu`): one before the selection, one after it. The value after the selection overwrites the memory of the old
    moment, from which the value before the selection is computed. So the program would copy the old moment of every
    parameter.
    """
    program = Program.trace(tx.update, grads, old_state, params)
    if shares_threads(layout.mesh):
        program = program.replace_closed(one_matrix_at_a_time(program.closed))
    updates, state = program.out
    check_opt_state_kept(layout, old_state, jax.tree.map(lambda atom: atom.aval, state))
    given = assign(program.args, (grads, old_state, params))
    kept = keep_old_unless(ok, program.run(state, given), old_state)
    of_state = zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True)
    made = {var: x for var, x in of_state if not isinstance(var, Literal) and var not in given}
    return program.run(updates, given | made, effects=True), kept


@partial(jax.jit, inline=True)  # traced once per shape, not once per array
def _subtract(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return new - old for each element, but zero for elements whose old value was not finite."""
    return jnp.where(jnp.isfinite(old), new - old, jnp.zeros((), old.dtype))
