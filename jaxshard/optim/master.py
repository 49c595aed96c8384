"""Keep f32 master copies of low-precision parameters in the optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.core.transform import as_transform
from jaxshard.core.types import PyTree


class MasterState(NamedTuple):
    """The state of `js.optim.master`.

    Attributes:
      master: The f32 master copies of bf16 and f16 parameters; `optax.MaskedNode` for all other parameters.
      inner: The state of the wrapped transform, for the master copies.

    Example:
        state = js.optim.master(optax.adamw(3e-4)).init(params)
        state.master        # the parameters in f32
    """

    master: PyTree
    inner: Any


def master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep f32 master copies of bf16 and f16 parameters in the optimizer's state, and update the copies.

    After each step a parameter is its f32 copy, rounded.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.1. The master copies are optimizer state, and
    strategies split them like other optimizer state. For Adam and bf16 parameters the state takes 12 bytes per
    parameter (copy, mean, variance) in addition to the 2 bytes of the parameter (the K = 12 of Rajbhandari et al. 2020,
    section 3.1). Parameters of other dtypes have no master copy. Gradients are cast to f32; `tx` receives the master
    copies as its parameters. Extra arguments are passed on. No collectives.

    The update of a bf16 or f16 parameter is f32: the rounded new master copy minus the parameter. So
    `optax.apply_updates(params, updates)`, which adds in f32 and rounds, gives the rounded copy bit for bit, unless a
    step shrinks a parameter by more than a factor of 2**16 (bf16) or 2**13 (f16). Then the error is at most 2**-24 of
    the old parameter. Errors do not add up, since each update is computed from the current parameters. Put wrappers
    that need updates in the gradients' dtype inside: `master(optax.apply_if_finite(tx, 3))`.

    Args:
      tx: The transform to wrap.

    Returns:
      A transform with a `MasterState`; it is elementwise if `tx` is elementwise.

    Raises:
      ValueError: `update` is called without `params`.

    Example:
        tx = js.optim.master(optax.adamw(3e-4))
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    """
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> MasterState:
        originals = jax.tree.map(lambda p: _mask_others(p, p.astype(jnp.float32)), params)
        return MasterState(originals, tx.init(_merge(originals, params)))

    def update_fn(
        updates: PyTree, state: MasterState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, MasterState]:
        if params is None:
            raise ValueError("master: update needs the parameters; call tx.update(grads, state, params)")
        originals = _merge(state.master, params)
        grads = jax.tree.map(lambda g, p: g.astype(jnp.float32) if is_low(p) else g, updates, params)
        steps, inner = tx.update(grads, state.inner, originals, **extra_args)
        new = jax.tree.map(lambda original, step: original + step.astype(original.dtype), originals, steps)
        updates = jax.tree.map(lambda p, x, step: _rounded_difference(x, p) if is_low(p) else step, params, new, steps)
        return updates, MasterState(jax.tree.map(_mask_others, params, new), inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def is_low(x: Any) -> bool:
    """Return True if an array has a floating dtype of less than 32 bits, such as bf16."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4


def _mask_others(param: jax.Array, original: jax.Array) -> jax.Array | optax.MaskedNode:
    return original if is_low(param) else optax.MaskedNode()


def _merge(originals: PyTree, params: PyTree) -> PyTree:
    """Return the parameters with the f32 master copy in place of each parameter that has one."""
    return jax.tree.map(lambda p, original: original if is_low(p) else p, params, originals)


def _rounded_difference(new: jax.Array, param: jax.Array) -> jax.Array:
    # The barrier keeps the compiler from dropping the rounding as "excess precision", which would round twice, here and
    # after the addition.
    rounded: jax.Array = lax.optimization_barrier(new.astype(param.dtype))
    return rounded.astype(jnp.float32) - param.astype(jnp.float32)
