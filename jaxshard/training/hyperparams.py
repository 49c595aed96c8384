"""Find the current hyperparameters of an optimizer, if its state has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree


def find_hyperparams(opt_state: PyTree) -> dict[str, Any]:
    """Find the scalars that `optax.inject_hyperparams` keeps in an optimizer's state.

    For example the learning rate of

        tx = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)

    A transform made without `inject_hyperparams` keeps it in a Python closure, where it can't be found.

    Args:
      opt_state: an optimizer's state, or its shapes.

    Returns:
      {name: scalar} of the last update. If several transforms have a hyperparameter of the same name, its path in the
      state precedes the name: "0/learning_rate".
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
