"""Jit functions, and check before compiling that no device can wait in a collective for another forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxshard.proofs.parting import check_together


def checked_jit(fn: Callable[..., Any], what: str, **options: Any) -> Callable[..., Any]:
    """Jit a function, and refuse it if a collective is in a branch on which devices may differ.

    The check reads the trace that is compiled, once for arguments of each shape, also inside a program that the user
    traces.

    Args:
      fn: the function.
      what: the beginning of the message, such as "the evaluation".
      options: of `jax.jit`.

    Raises:
      ValueError: by a call; see `check_together`.
    """
    jitted = jax.jit(fn, **options)
    checked: set[Any] = set()

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if key not in checked:
            check_together(jitted.trace(*args).jaxpr, what)
            checked.add(key)
        return jitted(*args)

    return call
