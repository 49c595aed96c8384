"""Check that a value is an optax transform."""

from __future__ import annotations

from typing import Any

import optax


def check_transform(tx: Any) -> None:
    """Raise TypeError unless `tx` has the two functions of an optax transform."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    got = type(tx).__name__
    if callable(tx) and hasattr(tx, "__name__"):
        got = f"the {got} {tx.__name__}: call it, {tx.__name__}(...), if it makes one"
    raise TypeError(f"tx must be an optax GradientTransformation such as optax.adam(1e-3), got {got}")


def as_transform(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Convert an optax transform to one whose `update` accepts extra keyword arguments.

    Raises:
      TypeError: `tx` is no transform.
    """
    check_transform(tx)
    return optax.with_extra_args_support(tx)
