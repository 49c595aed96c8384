"""The rows of a batch, checked against devices and micro-batches before anything is compiled."""

from __future__ import annotations

import warnings

from jaxshard.core.batch_rows import (
    check_no_lists,
    describe_differing,
    describe_no_rows,
    name_those_without,
    row_counts,
)
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import row_count
from jaxshard.core.types import PyTree


def check_batch(layout: Layout, batch: PyTree, microbatches: int, *, whole: bool = False) -> None:
    """Check the rows of a batch.

    Args:
      layout: says which mesh axes split the rows.
      batch: a tree of arrays or ShapeDtypeStructs [rows, ...]; scalars, and arrays without rows, are ignored.
      microbatches: the engine's number of micro-batches.
      whole: True where the loss sees the whole batch. Then arrays with different first sizes are taken as they are,
        with a warning that names those that every device has whole.

    Raises:
      TypeError: a list of numbers stands where an array is meant.
      ValueError: no array has rows, they have different numbers of them, or devices and micro-batches do not divide
        the rows.
    """
    check_no_lists("the batch", batch)
    counts = row_counts(layout.strategy, batch)
    if not counts:
        raise ValueError(describe_no_rows(batch))
    mask = layout.rows_mask(batch)
    count = row_count(select(mask, batch))
    if len(set(counts.values())) > 1:
        if not whole:
            raise ValueError(
                f"{describe_differing(counts)}; use js.auto() without micro-batches, whose loss sees the whole batch, "
                f"or {name_those_without(counts, count)}"
            )
        others = ", ".join(f"{path}: {size}" for path, size in counts.items() if size != count)
        if axis_size(layout.mesh, layout.batch_axes) > 1:
            fix = name_those_without(counts, count)
            warnings.warn(
                f"arrays of the batch differ in their first sizes: those of {count} are taken for rows, which devices "
                f"share, and every device has these whole: {others}. To choose yourself, {fix}",
                stacklevel=4,
            )
    layout.batch_shardings(batch)
    parts = microbatches * axis_size(layout.mesh, layout.batch_axes)
    if count == 0 or count % parts:
        raise ValueError(
            f"a batch of {count} rows does not divide into {microbatches} micro-batches over {parts // microbatches} "
            f"devices; use a multiple of {parts} rows, such as {max(parts, count + -count % parts)}"
        )
