"""`Source`: an endless sequence of rows, divided into global batches; every host reads only the rows of its devices."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Int

from jaxshard.core.types import PyTree
from jaxshard.data.order import permute


class Source(Protocol):
    """A protocol for data with random access: any host can read any rows of the global batch of any step.

    All rows of all steps form one sequence. With a batch of 4:

        step        0             1             2
        row         0  1  2  3    0  1  2  3    0 ...
        position    0  1  2  3    4  5  6  7    8 ...

    `rows` must depend only on its arguments. So the batches are the same for any number of processes, each process
    reads only the rows of its own devices, and training resumes at any step without a saved state. `js.data.windows`,
    `examples` and `mixture` make sources; your own source is a class with `batch` and `rows`.

    Attributes:
      batch: the number of global rows of a step.

    Example:
        class Noise:
            batch = 32

            def rows(self, step, rows):
                return {"x": np.stack([np.random.default_rng((step, row)).normal(size=8) for row in rows])}

        batches = js.batches(Noise(), layout)
    """

    @property
    def batch(self) -> int: ...

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> PyTree:
        """Return a tree of NumPy arrays [len(rows), ...]: the given rows of the global batch of a step, in order."""
        ...


def global_positions(step: int, rows: Int[np.ndarray, " rows"], batch: int) -> Int[np.ndarray, " rows"]:
    """Return the positions of some rows of a step in the endless sequence of all rows of all steps: step * batch + row.

    Raises:
      ValueError: a row outside the batch, or a negative step.
    """
    rows = np.asarray(rows, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < batch):
        raise ValueError(f"data: rows {rows.min()} to {rows.max()} of a batch of {batch} rows")
    if step < 0:
        raise ValueError(f"data: steps count from 0, got step {step}")
    return rows + np.int64(step) * batch


def draw_indices(
    step: int, rows: Int[np.ndarray, " rows"], *, batch: int, size: int, seed: int | None
) -> Int[np.ndarray, " rows"]:
    """Return the index of an example, from 0 to size - 1, for each of the given rows of a step's batch, int64.

    The endless sequence of all rows is divided into epochs of `size` rows. A batch may contain rows of two epochs. Each
    epoch has every example once, in a new random order; with seed=None in the order 0, 1, ..., size - 1.
    """
    epoch, position = np.divmod(global_positions(step, rows, batch), size)
    return position if seed is None else permute(position, size=size, seed=seed, epoch=epoch)
