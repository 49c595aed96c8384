"""A plain Shampoo, for tests: the factors of every matrix, their inverse fourth roots, and the gradient between them.

Source: Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization", algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ShampooState(NamedTuple):
    """The sums of the gradients' outer products: left [m, m] and right [n, n] of every matrix; [] for vectors."""

    count: jax.Array
    left: Any
    right: Any


def shampoo(rate: float, eps: float = 1e-2) -> optax.GradientTransformation:
    """Precondition matrices from both sides; vectors take plain steps."""

    def init(params: Any) -> ShampooState:
        def factor(dim: int) -> Any:
            return jax.tree.map(lambda p: eps * jnp.eye(p.shape[dim]) if p.ndim == 2 else jnp.zeros(()), params)

        return ShampooState(jnp.zeros((), jnp.int32), factor(0), factor(1))

    def update(grads: Any, state: ShampooState, params: Any = None) -> tuple[Any, ShampooState]:
        left = jax.tree.map(lambda g, x: x + g @ g.T if g.ndim == 2 else x, grads, state.left)
        right = jax.tree.map(lambda g, x: x + g.T @ g if g.ndim == 2 else x, grads, state.right)

        def step(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return -rate * (_root(a) @ g @ _root(b) if g.ndim == 2 else g)

        return jax.tree.map(step, grads, left, right), ShampooState(state.count + 1, left, right)

    return optax.GradientTransformation(init, update)


def _root(x: jax.Array) -> jax.Array:
    """The inverse fourth root of a positive definite matrix."""
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * jnp.maximum(values, 1e-12) ** -0.25) @ vectors.T
