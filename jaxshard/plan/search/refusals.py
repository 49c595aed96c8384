"""Errors that mean "this layout can't do that", and those that mean a fault."""

from __future__ import annotations

from jaxshard.core.unsuited import Unsuited


def is_refusal(error: Exception) -> bool:
    """Return True for an error by which a check says what a layout can't do.

    Those are ValueErrors and `Unsuited`. Another TypeError is a fault: the search makes layouts and engines itself, so
    that no check of types refuses them, and Python and JAX raise it in the middle of a computation.
    """
    return isinstance(error, ValueError | Unsuited)
