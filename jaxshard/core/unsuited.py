"""The error for a loss or model that this layout or engine can't train, but another may."""

from __future__ import annotations


class Unsuited(TypeError):
    """Raised if the chosen engine, schedule or form of attention can't train a loss or model.

    Another layout or engine may be able to train it, so a search over layouts catches this error and goes on. Only
    checks raise it. Any other TypeError, of Python or JAX in the middle of a computation, is a bug. Values that a
    layout can't hold or divide are ValueErrors.
    """
