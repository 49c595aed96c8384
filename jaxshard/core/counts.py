"""Whole numbers that users give: of steps between two calls, of steps to wait, of parts."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_count(who: str, *, least: int = 1, **counts: Any) -> None:
    """Raise for numbers that count nothing.

    Args:
      who: the function or class that they are given to.
      least: the smallest number that is allowed.
      **counts: the numbers by the names of their parameters; None stands for one that is not given.

    Raises:
      TypeError: one is no whole number, such as the text "10".
      ValueError: one is too small.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{who}: {name} must be a whole number, got {value!r} ({type(value).__name__})")
        if value < least:
            raise ValueError(f"{who}: {name} must be at least {least}, got {value}")
