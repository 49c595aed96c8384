"""The error for a loss or model that this layout or engine can't train, but another may."""

from __future__ import annotations


class Unsuited(TypeError):
    """Raised if a loss or model can't be trained by this engine, schedule or form of attention.

    Only checks raise it, so that a search over layouts can tell it from a TypeError of Python or JAX in the middle of a
    computation, which is a bug. Values that a layout can't hold or divide are ValueErrors.
    """
