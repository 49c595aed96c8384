"""Make batches whose parts differ between devices, to find losses that depend on all rows.

A loss that depends on all rows of a batch, for example by a branch on their mean, is wrong if each device sees only its
own rows. The given batch may hide that: the mean over each device's rows may lead to the same branch as the mean over
all rows. So the rows are reordered so that devices differ, and numbers are moved apart:

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
    """Make variants of a batch, with the same shapes, in which the parts of devices differ from each other.

    Args:
      batch: NumPy arrays.
      mask: True for arrays that have rows, [rows, ...]; the others stay as they are.
      parts: the number of equal parts, one for each device and micro-batch.

    Yields:
      (name, batch) of each variant that differs from the given batch; nothing if there is a single part.
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
    """Move the parts of an array apart: add a constant to parts 0, 2, 4, ..., and subtract it from parts 1, 3, 5, ...

    A part is the rows of one device and micro-batch; `part` has for each row the index of its part. An array without
    negative numbers is multiplied by 2 in parts 0, 2, ... and by 1/2 in parts 1, 3, ... instead. Arrays that contain
    both zeros and ones and nothing else (masks, weights of rows) stay as they are.
    """
    if not x.size or not np.isfinite(x).all() or (np.isin(x, (0, 1)).all() and np.ptp(x)):
        return x
    even = (part % 2 == 0).reshape(-1, *(1,) * (x.ndim - 1))
    x = np.where(even, x, 1) if not x.any() else x
    scaled, shifted = x * np.where(even, 2.0, 0.5), x + np.where(even, 1.0, -1.0) * 2 * x.std()
    return np.asarray(scaled if (x >= 0).all() or not np.ptp(x) else shifted, x.dtype)
