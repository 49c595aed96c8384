"""Low-precision parameters whose f32 originals are optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.core.types import PyTree


class MasterState(NamedTuple):
    """The f32 originals of the low-precision parameters (`optax.MaskedNode` for the others), and the state of `tx`."""

    master: PyTree
    inner: Any


def master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` run on f32 originals of the bf16 or f16 parameters, which follow them rounded.

    The state is `MasterState(master, inner)`: for Adam and bf16 parameters 12 bytes per parameter (original, mean,
    variance) next to the 2 of the parameter (the K = 12 of Rajbhandari et al. 2020, section 3.1). Parameters of other
    dtypes have no second copy. Gradients are cast to f32; `tx` sees the originals as its parameters.

    The update of a bf16 or f16 parameter is f32: the rounded new original minus the parameter, so that
    `optax.apply_updates(params, updates)`, which adds in f32 and rounds, gives the rounded original bit for bit as
    long as one step does not shrink a parameter by more than a factor of 2**16 (bf16) or 2**13 (f16); beyond that it
    is off by at most 2**-24 of the old parameter. Errors do not add up: each update starts from the parameters that
    there are.

    Extra arguments are passed on. No collectives. `tx.update` needs `params`, a ValueError otherwise.
    """
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> MasterState:
        originals = jax.tree.map(_original, params)
        return MasterState(originals, tx.init(_merge(originals, params)))

    def update_fn(
        updates: PyTree, state: MasterState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, MasterState]:
        if params is None:
            raise ValueError("master: update needs the parameters; call tx.update(grads, state, params)")
        originals = _merge(state.master, params)
        grads = jax.tree.map(lambda g, p: g.astype(jnp.float32) if _is_low(p) else g, updates, params)
        steps, inner = tx.update(grads, state.inner, originals, **extra_args)
        moved = jax.tree.map(lambda original, step: original + step.astype(original.dtype), originals, steps)
        kept = jax.tree.map(lambda p, new: new if _is_low(p) else optax.MaskedNode(), params, moved)
        updates = jax.tree.map(lambda p, new, step: _difference(new, p) if _is_low(p) else step, params, moved, steps)
        return updates, MasterState(kept, inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_low(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def _original(x: jax.Array) -> jax.Array | optax.MaskedNode:
    return x.astype(jnp.float32) if _is_low(x) else optax.MaskedNode()


def _merge(originals: PyTree, params: PyTree) -> PyTree:
    """The parameters with their f32 originals where there are any."""
    return jax.tree.map(lambda p, original: original if _is_low(p) else p, params, originals)


def _difference(new: jax.Array, param: jax.Array) -> jax.Array:
    # The barrier keeps the compiler from dropping the rounding as "excess precision", which would round twice, here and
    # after the addition.
    rounded = lax.optimization_barrier(new.astype(param.dtype))
    return rounded.astype(jnp.float32) - param.astype(jnp.float32)
