"""Check that the means of a loss over the parts of a batch (devices, micro-batches) add up to its global mean."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax

from jaxshard.adapt.positionwise.rows import all_count_rows, find_unequal_means
from jaxshard.core.jaxpr import Program
from jaxshard.core.layout import Layout, join_model, select
from jaxshard.core.loss import Loss
from jaxshard.core.tree import abstract, row_count
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.just_in_time import cast_shapes


class UnequalMeans(Unsuited):
    """Raised if the means of a loss or metric over parts of a batch do not combine to the mean over the batch.

    A part is the rows of one device, or of one of its micro-batches.
    """


def has_doubtful_mean(program: Program, loss: Loss, rows: PyTree) -> bool:
    """Return False if a trace proves that each `js.Mean` over parts of the batch combines to the mean over the batch.

    That is proven, for example, if the weight of every `js.Mean` is computed from the rows of the part. True means that
    the trace alone proves nothing, and that the check of `make_mean_check` has to run.

    Args:
      program: the jaxpr of the loss of a part of the batch.
      loss: the result of the loss, with variables of the jaxpr in place of arrays.
      rows: the input variables that have rows, a tree.
    """
    inputs: list[Any] = jax.tree.leaves(rows)
    # A shape of size 1 in the trace of a single row may or may not be the number of rows.
    return inputs[0].aval.shape[0] == 1 or not all_count_rows(program.closed, loss, inputs)


def make_mean_check(
    layout: Layout,
    fn: Callable[..., Any],
    parts: int,
    manual: Set[str],
    *,
    compute_dtype: Any = None,
    with_key: bool = True,
) -> Callable[[PyTree], None]:
    """Make `check(batch)`, which raises if the parts' `js.Mean`s of `fn` do not combine to the mean over the batch.

    A part is the rows of one device, or of one of its micro-batches. A mean is wrong, for example, if its weight is the
    constant number of rows of the batch, of which a part has fewer.

    The check compares the jaxprs of `fn` for the rows of a part and for all rows. It takes about as long as tracing
    `fn` twice, and no time for a single part or for shapes that passed before. An engine calls `has_doubtful_mean`
    first.

    Args:
      layout: the layout, which knows which arrays of a batch have rows.
      fn: `fn(model, batch, key)` returns a `js.Mean` or `js.Loss`; `fn(model, batch)` metrics if `with_key` is False.
      parts: the number of parts: the devices that split the rows, times the micro-batches of each.
      manual: the mesh axes whose names `fn` may use in collectives.
      compute_dtype: the dtype of the weights; None for the parameters' own.
      with_key: whether `fn` takes a random key.

    Raises:
      UnequalMeans: when `check` runs, with all means that are certainly wrong.
    """
    passed: set[Any] = set()

    def check(batch: PyTree) -> None:
        mask, whole = layout.rows_mask(batch), abstract(batch)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(whole))
        count = row_count(select(mask, whole))
        if parts == 1 or count % parts or shapes in passed:
            return
        rows = jax.tree.map(lambda x, has: _resize(x, count // parts) if has else x, whole, mask)
        model = join_model(cast_shapes(layout.shapes.params, compute_dtype), layout.shapes.state)
        after = [layout.shapes.key] if with_key else []
        in_model, in_batch = len(jax.tree.leaves(model)), jax.tree.leaves(mask)
        has_rows = [False] * in_model + in_batch + [False] * len(after)
        sizes = {axis: layout.mesh.shape[axis] for axis in sorted(manual)}
        if found := find_unequal_means(fn, (model, rows, *after), has_rows, parts, manual=sizes):
            raise UnequalMeans("\n".join(found))
        passed.add(shapes)

    return check


def _resize(x: Any, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
