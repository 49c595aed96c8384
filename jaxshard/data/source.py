"""`Source`: a global batch per step, of which any host reads any rows."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxshard.core.types import PyTree


class Source(Protocol):
    """What `batches` reads: a global batch that any host can read any rows of.

    `batch` is the number of global rows of a step; `rows(step, rows)` is a tree of NumPy arrays [len(rows), ...], the
    given global rows of that step's batch, which depend on nothing else. All rows of all steps together are one
    sequence, row r of step s at s * batch + r.
    """

    @property
    def batch(self) -> int: ...

    def rows(self, step: int, rows: np.ndarray) -> PyTree: ...


def places(step: int, rows: Any, batch: int) -> np.ndarray:
    """int64[len(rows)]: where these rows of a step stand in the sequence of all rows.

    Raises:
      ValueError: a row outside the batch, a negative step.
    """
    rows = np.asarray(rows, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < batch):
        raise ValueError(f"data: rows {rows.min()} to {rows.max()} of a batch of {batch} rows")
    if step < 0:
        raise ValueError(f"data: steps count from 0, got step {step}")
    return np.int64(step) * batch + rows
