"""Separate the floating leaves of activations, which have cotangents, from other leaves.

A tree of activations may have integers or booleans (positions, masks) as well as floats. Its floating part is the same
tree with None for every other leaf, an empty subtree for JAX, so that `jax.vjp` differentiates only the floats.

    x            = {"h": f32[4, 8], "position": i32[4]}
    floats_of(x) = {"h": f32[4, 8], "position": None}
    fill(floats_of(x), x) == x
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree


def floats_of(x: PyTree) -> PyTree:
    """Return the tree with None for the leaves that are not floating (or complex)."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, x)


def fill(some: PyTree, everything: PyTree) -> PyTree:
    """Replace each None in `some` by the leaf of `everything`."""
    return jax.tree.map(lambda new, old: old if new is None else new, some, everything, is_leaf=lambda x: x is None)
