"""Check that `tx.update` keeps the shapes and dtypes of the optimizer's state, as a compiled step requires."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.layout import Layout
from jaxshard.core.tree import abstract, check_same_tree, paths, raise_all, same_structure
from jaxshard.core.types import PyTree
from jaxshard.training.hyperparams import find_hyperparams


def check_opt_state_kept(layout: Layout, old: PyTree, new: PyTree) -> None:
    """Raise unless `tx.update` returned the structure, shapes and dtypes that it received.

    Args:
      layout: has the shapes without padding, for messages.
      old: the optimizer's state that `tx.update` received, stored or logical.
      new: the optimizer's state that `tx.update` returned.

    Raises:
      ValueError: another tree, shape or dtype; the message names each such array, and how to keep its dtype.
    """
    before, after = jax.tree.leaves(abstract(old)), jax.tree.leaves(abstract(new))
    if not same_structure(old, new) or any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        check_same_tree(
            abstract(old), abstract(new), "tx.update returned another state than tx.init",
            "a compiled step needs the same arrays before and after; initialise them all in tx.init",
        )  # fmt: skip
    logical: list[Any] = jax.tree.leaves(layout.shapes.opt_state)
    raise_all(
        (
            f"{path}: {jnp.dtype(a.dtype)}{list(shape.shape)} becomes {jnp.dtype(b.dtype)}{list(shape.shape)}"
            for path, a, b, shape in zip(paths(old), before, after, logical, strict=True)
            if a.dtype != b.dtype
        ),
        ValueError,
        f"tx.update returned other dtypes than tx.init, and a compiled step keeps them; {_keep_dtypes(old)}",
    )


def _keep_dtypes(opt_state: PyTree) -> str:
    """Return the part of the error message that says how to keep the dtypes of the optimizer's state."""
    names = sorted({name.rpartition("/")[2] for name in find_hyperparams(opt_state)} - {"learning_rate"})
    if not names:
        return (
            "an array among the numbers of tx promotes what it multiplies: write Python numbers, or give the state a "
            "dtype of its own, such as optax.adamw(..., mu_dtype=jnp.float32)"
        )
    return (
        "optax.inject_hyperparams makes arrays of numbers, which promote what they multiply: leave those out that no "
        f"schedule changes, static_args={tuple(names)}, or give all parameters one dtype"
    )
