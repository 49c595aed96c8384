"""The error of a loss or model that a layout or engine can't train, though another one may."""

from __future__ import annotations


class Unsuited(TypeError):
    """A loss or model can't be trained in this way: by this engine, schedule or form of attention.

    It is raised by checks alone, so that a search over layouts can tell it from a TypeError that Python or JAX found in
    the middle of a computation, which is a fault. Values that a layout can't hold or divide are ValueErrors.
    """
