"""Compare the arrays of a sharded step with those of one device, leaf by leaf.

The error of an array is its largest absolute difference, relative to its largest magnitude. There are two exceptions,
which depend on the other arrays of its tree:

- The error is never relative to less than 1e-3 of the tree's largest magnitude, because an array of much smaller
  numbers is often a difference of larger ones.
- A gradient that is zero in exact arithmetic, such as that of a bias before a normalisation, is only rounding error.
  Two gradients below 1e-6 of the tree's largest magnitude count as equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.tree import paths, same_structure
from jaxshard.core.types import PyTree

_ROUNDING = 1e-6
"""Gradients below this share of the largest magnitude in their tree count as zero: they are rounding of f32."""

_FLOOR = 1e-3
"""Errors are relative to no less than this share of the largest magnitude in the tree."""

CLOSE = 1e-3
"""The relative difference up to which one array counts as a multiple of another."""


class Difference(NamedTuple):
    """The relative error of one array of the sharded step, compared with the same array of one device.

    Attributes:
      what: "loss", "gradient", "update" or "state".
      leaf: the path of the array in its tree; "" for the loss.
      error: the relative error; NaN if either array has numbers that are not finite.
      allowed: the largest error that passes.
      note: which of the two arrays has numbers that are not finite; "" if neither has.
      factor: the constant by which all elements are off, so that sharded array = factor * array of one device; None
        if there is none, or numbers are not finite.
      size: the number of elements.
    """

    what: str
    leaf: str
    error: float
    allowed: float
    note: str
    factor: float | None
    size: int

    @property
    def ok(self) -> bool:
        """True if the error is no larger than allowed."""
        return bool(self.error <= self.allowed)

    @property
    def name(self) -> str:
        """The kind and the path of the array: "gradient dense/kernel"."""
        return f"{self.what} {self.leaf}".rstrip()

    def __str__(self) -> str:
        return "not finite" if np.isnan(self.error) else f"{self.error:.1e}" if self.error else "0"


def compare_losses(loss: float, expected: float, allowed: float) -> Difference:
    """Compare two losses; the error is relative to the expected loss, or absolute if the expected loss is 0."""
    return _compare("loss", "", np.asarray(loss), np.asarray(expected), allowed, floor=0.0 if expected else 1.0)


def compare_trees(what: str, ours: PyTree, theirs: PyTree, allowed: float) -> list[Difference]:
    """Compare two trees of arrays with the same structure and shapes; return one `Difference` per leaf.

    Args:
      what: the kind of the arrays: "gradient", "update" or "state".
      ours: the arrays of the sharded step, in model order.
      theirs: the arrays of the step on one device.
      allowed: the largest relative error of floating arrays; integers must be equal.
    """
    assert same_structure(ours, theirs), "a layout keeps the tree"
    leaves = list(zip(paths(theirs), *(map(to_numpy, jax.tree.leaves(tree)) for tree in (ours, theirs)), strict=True))
    floats = [b[np.isfinite(b)] for _, _, b in leaves if np.issubdtype(b.dtype, np.floating)]
    largest = max((float(np.abs(b).max(initial=0)) for b in floats), default=0.0)
    zero = _ROUNDING * largest if what == "gradient" else 0.0
    return [_compare(what, path, a, b, allowed, _FLOOR * largest, zero) for path, a, b in leaves]


def _compare(
    what: str, leaf: str, a: np.ndarray, b: np.ndarray, allowed: float, floor: float, zero: float = 0.0
) -> Difference:
    """Compare an array of the sharded step with that of one device; integers must be equal.

    Args:
      what: the kind of the arrays, such as "gradient".
      leaf: their path in the tree.
      a: the array of the sharded step.
      b: the array of one device.
      allowed: the largest relative error of floats.
      floor: the smallest magnitude to which the error is relative.
      zero: arrays whose magnitudes are below this count as equal.
    """
    allowed = allowed if np.issubdtype(b.dtype, np.floating) else 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    note = _describe_non_finite(a, b)
    error = float("nan") if note else _error(a, b, floor, zero)
    return Difference(what, leaf, error, allowed, note, None if note else _factor(a.ravel(), b.ravel()), b.size)


def _factor(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the factor with a = factor * b; None if there is no such constant, or it is 1."""
    square = b @ b
    if not square:
        return None
    factor = float(a @ b / square)  # least squares: the factor that brings factor * b closest to a
    close = np.abs(a - factor * b).max() <= CLOSE * np.abs(a).max()
    return factor if close and abs(factor - 1) > CLOSE else None


def _error(a: np.ndarray, b: np.ndarray, floor: float, zero: float) -> float:
    """Return max |a - b| / max(max |b|, floor); 0 if all elements of `a - b` and of `b` are below `zero`."""
    if not b.size:
        return 0.0
    size, apart = float(np.abs(b).max()), float(np.abs(a - b).max())
    if apart == 0 or max(size, apart) <= zero:
        return 0.0
    return apart / max(size, floor) if max(size, floor) else float("inf")


def _describe_non_finite(a: np.ndarray, b: np.ndarray) -> str:
    """Say which of the two arrays has numbers that are not finite, the sharded or the other; "" if neither."""
    if np.isfinite(a).all() and np.isfinite(b).all():
        return ""
    if np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "on both sides at the same places, so that nothing can be compared: give finite parameters and data"
    sides = [name for name, x in (("sharded", a), ("on one device", b)) if not np.isfinite(x).all()]
    return " and, elsewhere, ".join(sides)


def to_numpy(x: Any) -> np.ndarray:
    """Convert an array, or the data of a random key, to NumPy."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
