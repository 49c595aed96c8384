"""Batches that tell devices apart, made of one that may treat them all alike.

A loss that looks at all rows of a batch, for example to branch on their mean, is wrong where each device sees its own
rows alone. On one given batch that need not show: the mean over the rows of every device may decide as that over all
rows does. So the rows are put in an order in which devices differ, and numbers are moved apart:

    given               3 1 | 4 1 | 5 9 | 2 6
    sorted              1 1 | 2 3 | 4 5 | 6 9        (by the mean of a row, for the first float and integer array)
    one row per device  3 3 | 4 4 | 5 5 | 2 2
    moved apart         3+s 1+s | 4-s 1-s | 5+s 9+s | 2-s 6-s    (floats; those that are not negative are scaled)
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxshard.core.layout import select
from jaxshard.core.tree import path_str, row_count
from jaxshard.core.types import PyTree


def make_separating(batch: PyTree, mask: PyTree, parts: int) -> Iterator[tuple[str, PyTree]]:
    """Make batches of the same shapes in which the parts differ from each other.

    Args:
      batch: NumPy arrays.
      mask: True for those that have rows, [rows, ...]; the others stay as they are.
      parts: the number of equal parts that devices and micro-batches see.

    Yields:
      A name, and the batch; none that equals the given one, and none for a single part.
    """
    if parts == 1:
        return
    rows = row_count(select(mask, batch))
    size = rows // parts
    part = np.arange(rows) // size

    def take(order: np.ndarray) -> PyTree:
        return jax.tree.map(lambda x, has_rows: x[order] if has_rows else x, batch, mask)

    for kinds in ("f", "iu"):
        for path, x in jax.tree_util.tree_leaves_with_path(select(mask, batch)):
            means = x.reshape(rows, -1).mean(1) if x.size and x.dtype.kind in kinds else np.zeros(rows)
            order = np.argsort(means, kind="stable")
            if (order != np.arange(rows)).any():
                yield f"rows sorted by {path_str(path) or 'the batch'}", take(order)
                break
    if size > 1:
        yield "one row for each device", take(part * size)
    moved = jax.tree.map(
        lambda x, has_rows: _move_apart(x, part) if has_rows and x.dtype.kind == "f" else x, batch, mask
    )
    if any(a is not b for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(batch), strict=True)):
        yield "numbers moved apart between devices", moved


def _move_apart(x: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Move the rows of every other part up and those of the others down; what is no measurement stays.

    Numbers that are never negative are scaled by 2 and 1/2 instead. Zeros and ones (masks, weights) stay, but where all
    are the same, as in a batch made for a test.
    """
    if not x.size or not np.isfinite(x).all() or (np.isin(x, (0, 1)).all() and np.ptp(x)):
        return x
    even = (part % 2 == 0).reshape(-1, *(1,) * (x.ndim - 1))
    x = np.where(even, x, 1) if not x.any() else x
    scaled, shifted = x * np.where(even, 2.0, 0.5), x + np.where(even, 1.0, -1.0) * 2 * x.std()
    return np.asarray(scaled if (x >= 0).all() or not np.ptp(x) else shifted, x.dtype)
