"""The optimizer's part of a step: gradients and parameters brought to its state, updated, and brought back."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.collectives import Sums
from jaxshard.core.layout import Layout, put_back, select
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import abstract, check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.training.extra_args import ExtraArgs, LossAt
from jaxshard.training.non_finite import keep_old_unless, sum_of_squares
from jaxshard.training.views import hold_stored, move_stored, store, unstore

NO_EXTRA_ARGS = ExtraArgs()

Update = Callable[[PyTree, PyTree, PyTree, jax.Array, jax.Array, LossAt], tuple[PyTree, PyTree, jax.Array]]


def make_update(
    tx: optax.GradientTransformation, layout: Layout, sums: Sums, *, stored: bool, extra: ExtraArgs = NO_EXTRA_ARGS
) -> Update:
    """Make `update(params, grads, opt_state, ok, loss, loss_at) -> (params, opt_state, changes)` of stored arrays.

    A gradient comes in as the layout's `grads` say, is moved to where its optimizer state is, and meets `tx.update`
    there; the new parameter goes back to its own `store`.

    Args:
      tx: an optax transform.
      layout: says where everything lives.
      sums: how numbers are added over devices.
      stored: whether `tx` runs on the stored arrays; otherwise on logical ones, unpadded and in model order.
      extra: the extra arguments that `tx` uses. They are made of `loss`, a scalar, and
        `loss_at(stored parameters) -> (loss, gradients as the layout stores them)`.

    Returns:
      The function. Unless `ok`, a bool on the device, it returns the old arrays bit for bit. They are chosen where the
      optimizer's state is, before they are gathered, so that a gather still writes into the donated array. `changes`,
      f32[trained parameters], is the sum of squares of what each changed by, or NaN if an element of it is no longer
      finite that was.
    """
    tx = tx if extra.names else as_transform(tx)
    old_params, seen = select(layout.trainable, layout.params), layout.opt_params
    specs = [placement.store for placement in jax.tree.leaves(seen)]

    def view(placements: PyTree, tree: PyTree) -> PyTree:
        return tree if stored else unstore(placements, tree)

    def restore_view(placements: PyTree, tree: PyTree) -> PyTree:
        if stored:
            return jax.tree.map(lambda x, placement: placement.view.clear_padding(x), tree, placements)
        return store(placements, tree)

    def see(grads: PyTree) -> PyTree:
        return view(seen, move_stored(layout, grads, layout.grads, seen))

    def update(
        params: PyTree, grads: PyTree, opt_state: PyTree, ok: jax.Array, loss: jax.Array, loss_at: LossAt
    ) -> tuple[PyTree, PyTree, jax.Array]:
        def seen_loss_at(at: PyTree) -> tuple[jax.Array, PyTree]:
            at = jax.tree.map(lambda x, like: x.astype(like.dtype), at, chosen)  # an optimizer may hold them in f32
            at = move_stored(layout, hold_stored(layout, restore_view(seen, at), seen), seen, old_params)
            loss, grads = loss_at(put_back(layout.trainable, at, params))
            return loss, see(grads)

        # Gradients and parameters go to where the optimizer state is: a slice where that is split more (ZeRO-1 and 2).
        chosen = view(seen, move_stored(layout, select(layout.trainable, params), old_params, seen))
        grads = see(grads)
        old_state = view(layout.opt_state, opt_state)
        updates, new_state = tx.update(grads, old_state, chosen, **extra.make(grads, loss, seen_loss_at))
        check_same_tree(
            abstract(old_state), abstract(new_state), "tx.update returned another state than tx.init",
            "a compiled step needs the same arrays before and after; initialise them all in tx.init",
        )  # fmt: skip
        # Chosen before anything is gathered (see above); `hold_stored` keeps the compiler from gathering both first.
        new = keep_old_unless(ok, optax.apply_updates(chosen, updates), chosen)
        # Of the numbers that are written anyway, so that parameters are read once.
        steps = [_subtract(*pair) for pair in zip(jax.tree.leaves(new), jax.tree.leaves(chosen), strict=True)]
        changes = sums.stack_totals(sum_of_squares, steps, specs, layout.mesh)
        fresh = hold_stored(layout, restore_view(seen, new), seen)
        # Here parameters are gathered that rest split less than their optimizer state.
        fresh = move_stored(layout, fresh, seen, old_params)
        opt_state = keep_old_unless(ok, restore_view(layout.opt_state, new_state), opt_state)
        return put_back(layout.trainable, fresh, params), opt_state, changes

    return update


def _subtract(new: jax.Array, old: jax.Array) -> jax.Array:
    """Subtract elementwise; zero where the old element was not finite."""
    return jnp.where(jnp.isfinite(old), new - old, jnp.zeros((), old.dtype))
