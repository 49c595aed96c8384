"""A context in which a program is traced to count its FLOPs, not to run: layers then trace formulas, not kernels.

The jaxpr of a kernel hides its matrix products, or differs from platform to platform. The jaxpr of the formula that the
kernel computes shows them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

_counting = jax.make_user_context(default_value=False)


def count_formulas() -> AbstractContextManager[None]:
    """Return a context in which layers are traced as plain formulas instead of kernels, to count their FLOPs."""
    context: AbstractContextManager[None] = _counting(True)
    return context


def is_counting() -> bool:
    """Return True inside `count_formulas`, where a program is traced only to count its FLOPs."""
    return bool(_counting.value)
