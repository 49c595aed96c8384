"""A context in which a program is traced to count its FLOPs, not to run: layers then trace their formulas.

The jaxpr of a kernel does not show its matrix products, or shows others on every platform; that of its formula does.
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
