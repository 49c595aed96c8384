"""Trace the update of a transform, and cache the jaxpr, which the layout and the step both need."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from jaxshard.core.types import PyTree


def traced_update(tx: Any, params: PyTree) -> tuple[Any, PyTree, tuple[PyTree, PyTree]]:
    """Trace `tx.update` with only gradients, state and parameters; the last few traces are cached.

    Args:
      tx: An optax transform.
      params: The abstract parameters.

    Returns:
      (the closed jaxpr, the abstract state before the update, the abstract results (updates, state)).

    Raises:
      NameError, TypeError, ValueError: `tx.update` can't be traced with these arguments.
    """
    leaves, structure = jax.tree.flatten(params)
    try:
        found: _Traced = _traced(tx.init, tx.update, structure, tuple((x.shape, x.dtype) for x in leaves))
        return found
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _trace(tx.init, tx.update, params)


_Traced = tuple[Any, PyTree, tuple[PyTree, PyTree]]


@lru_cache(maxsize=4)
def _traced(init: Callable[..., Any], update: Callable[..., Any], structure: Any, leaves: Any) -> Any:
    return _trace(init, update, structure.unflatten([jax.ShapeDtypeStruct(*one) for one in leaves]))


def _trace(init: Callable[..., Any], update: Callable[..., Any], params: PyTree) -> _Traced:
    state = jax.eval_shape(init, params)
    closed, after = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    return closed, state, after
