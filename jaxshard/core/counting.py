"""A context in which a program is traced to be counted, not run: layers then show the products of their formula.

A kernel says nothing about what it computes, or something else on every platform. What a model asks for is its formula.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

_counting = jax.make_user_context(default_value=False)


def count_formulas() -> AbstractContextManager[None]:
    """Make a context in which layers compute by their formulas."""
    context: AbstractContextManager[None] = _counting(True)
    return context


def is_counting() -> bool:
    """Return whether the program that is traced here is only counted."""
    return bool(_counting.value)
