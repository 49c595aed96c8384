"""Check integers that users pass as counts, such as steps between two calls, or parts."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_count(who: str, *, least: int = 1, **counts: Any) -> None:
    """Raise unless every count is an integer of at least `least`.

    Args:
      who: the function or class that receives them, for the message.
      least: the smallest number that is allowed.
      **counts: the counts by the names of their parameters; None is a parameter that was left out.

    Raises:
      TypeError: a count is not an integer, such as the string "10".
      ValueError: a count is too small.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{who}: {name} must be a whole number, got {value!r} ({type(value).__name__})")
        if value < least:
            raise ValueError(f"{who}: {name} must be at least {least}, got {value}")
