"""The hyperparameters of an optimizer that are in force, where its state shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree


def find_hyperparams(opt_state: PyTree) -> dict[str, Any]:
    """Find the scalars that `optax.inject_hyperparams` keeps in an optimizer's state.

    A transform made without it holds its learning rate in a Python closure, where nobody can see it:

        tx = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)

    Args:
      opt_state: an optimizer's state, or its shapes.

    Returns:
      {name: scalar}: those that the last update used. A name that several transforms have is preceded by the path of
      its own in the state: "0/learning_rate".
    """
    found: dict[str, Any] = {}
    states = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_has_hyperparams)
    holders = [(path_str(path), x.hyperparams) for path, x in states if _has_hyperparams(x)]
    names = Counter(name for _, hyperparams in holders for name in hyperparams)
    for path, hyperparams in holders:
        for name, value in hyperparams.items():
            if getattr(value, "ndim", None) == 0:
                found[name if names[name] == 1 else f"{path}/{name}"] = value
    return found


def _has_hyperparams(x: Any) -> bool:
    return isinstance(getattr(x, "hyperparams", None), dict)
