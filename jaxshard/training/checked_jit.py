"""`jax.jit` with a check that devices can't deadlock: no collective in a branch that only some devices may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxshard.proofs.parting import check_together


def checked_jit(fn: Callable[..., Any], what: str, **options: Any) -> Callable[..., Any]:
    """Jit a function, and refuse to run it if a collective is in a branch that only some devices may take.

    Such a program can deadlock. The check reads the jaxpr before compiling, once for each combination of argument
    shapes, also if the user calls the function while tracing a larger program.

    Args:
      fn: the function.
      what: the name of the function in error messages, such as "the evaluation".
      options: options of `jax.jit`.

    Returns:
      The jitted function.

    Raises:
      ValueError: a call found such a branch; see `check_together`.
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
