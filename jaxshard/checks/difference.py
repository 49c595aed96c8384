"""How far arrays are from what they should be, leaf by leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.tree import paths, same_structure
from jaxshard.core.types import PyTree

_ROUNDING = 1e-6
"""Of the gradient's largest magnitude: an array that stays below it on both sides is zero up to the rounding of f32, as
that of a bias in front of a normalisation."""


class Difference(NamedTuple):
    """How far one array of the sharded step is from one device's.

    `what` is "loss", "gradient", "update" or "state", `leaf` the array's path. `error` is the largest difference over
    the larger of the leaf's largest magnitude and 1e-3 of its tree's; NaN where numbers are not finite. Gradients below
    1e-6 of the tree's on both sides are f32's rounding of zero, and equal.
    """

    what: str
    leaf: str
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.allowed)

    @property
    def name(self) -> str:
        """What and which leaf: "gradient dense/kernel"."""
        return f"{self.what} {self.leaf}".rstrip()

    def __str__(self) -> str:
        return "not finite" if np.isnan(self.error) else f"{self.error:.1e}" if self.error else "0"


def loss_difference(loss: float, expected: float, allowed: float) -> Difference:
    """That of two numbers, relative."""
    error = abs(loss - expected) / abs(expected) if expected else abs(loss)
    return Difference("loss", "", error, allowed, _finite(np.asarray(loss), np.asarray(expected)))


def differences(what: str, ours: PyTree, theirs: PyTree, allowed: float) -> list[Difference]:
    """One per leaf; NaN where either side is not finite."""
    assert same_structure(ours, theirs), "a layout keeps the tree"
    leaves = list(zip(paths(theirs), *(map(numbers, jax.tree.leaves(tree)) for tree in (ours, theirs)), strict=True))
    floats = [b[np.isfinite(b)] for _, _, b in leaves if np.issubdtype(b.dtype, np.floating)]
    largest = max((float(np.abs(b).max(initial=0)) for b in floats), default=0.0)
    found = []
    for path, a, b in leaves:
        exact = not np.issubdtype(b.dtype, np.floating)
        zero = _ROUNDING * largest if what == "gradient" else 0.0
        note = _finite(a, b)
        error = float("nan") if note else _error(a.astype(np.float64), b.astype(np.float64), 1e-3 * largest, zero)
        found.append(Difference(what, path, error, 0.0 if exact else allowed, note))
    return found


def _error(a: np.ndarray, b: np.ndarray, floor: float, zero: float) -> float:
    if not b.size:
        return 0.0
    size, apart = float(np.abs(b).max()), float(np.abs(a - b).max())
    if apart == 0 or max(size, apart) <= zero:
        return 0.0
    return apart / max(size, floor) if max(size, floor) else float("inf")


def _finite(a: np.ndarray, b: np.ndarray) -> str:
    """What is odd about numbers that are not finite; nothing where all are."""
    if np.isfinite(a).all() and np.isfinite(b).all():
        return ""
    if np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "on both sides at the same places, so that nothing can be said: give finite parameters and data"
    sides = [name for name, x in (("sharded", a), ("on one device", b)) if not np.isfinite(x).all()]
    return " and, elsewhere, ".join(sides)


def numbers(x: Any) -> np.ndarray:
    """The array as NumPy; random keys as the words they are made of."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
