"""A plain SOAP on the smaller side of every matrix, for tests: Adam in the eigenvectors of the gradients' products.

The first step finds the eigenvectors and moves nothing, later ones turn them by a QR decomposition: two branches.
Source: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3 and its one-sided version.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class Moments(NamedTuple):
    """Of a matrix [m, n], m the smaller: averages of the gradient and, turned, of its square; factor; eigenvectors."""

    mean: Any
    square: Any
    factor: Any
    basis: Any


def soap(rate: float, decay: float = 0.9, eps: float = 1e-6) -> optax.GradientTransformation:
    """Update matrices by Adam in the basis of their factor; vectors take plain steps."""

    def init(params: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros((), jnp.int32), jax.tree.map(_zeros, params)

    def begin(g: jax.Array, s: Moments) -> tuple[jax.Array, Moments]:
        if g.ndim != 2:
            return -rate * g, s
        factor = s.factor + (1 - decay) * _product(g)
        return jnp.zeros_like(g), s._replace(factor=factor, basis=jnp.linalg.eigh(factor)[1])

    def go_on(g: jax.Array, s: Moments) -> tuple[jax.Array, Moments]:
        if g.ndim != 2:
            return -rate * g, s
        tall = g.shape[0] > g.shape[1]
        turned = s.basis.T @ (g.T if tall else g)
        mean, square = decay * s.mean + (1 - decay) * g, decay * s.square + (1 - decay) * turned**2
        update = s.basis @ (s.basis.T @ (mean.T if tall else mean) / (jnp.sqrt(square) + eps))
        factor = decay * s.factor + (1 - decay) * _product(g)
        moments = Moments(mean, square, factor, jnp.linalg.qr(factor @ s.basis)[0])
        return -rate * (update.T if tall else update), moments

    def update(grads: Any, state: tuple[jax.Array, Any], params: Any = None) -> Any:
        count, leaves, structure = state[0] + 1, *jax.tree.flatten(grads)
        held = structure.flatten_up_to(state[1])

        def run(one: Any) -> tuple[list[jax.Array], list[Moments]]:
            made = [one(g, s) for g, s in zip(leaves, held, strict=True)]
            return [x for x, _ in made], [s for _, s in made]

        updates, moments = lax.cond(count == 1, lambda: run(begin), lambda: run(go_on))
        return structure.unflatten(updates), (count, structure.unflatten(moments))

    return optax.GradientTransformation(init, update)


def _zeros(p: jax.Array) -> Moments:
    if p.ndim != 2:
        return Moments(*[jnp.zeros(())] * 4)
    small, large = sorted(p.shape)
    return Moments(jnp.zeros_like(p), jnp.zeros((small, large)), *[jnp.eye(small)] * 2)


def _product(g: jax.Array) -> jax.Array:
    return g.T @ g if g.shape[0] > g.shape[1] else g @ g.T
