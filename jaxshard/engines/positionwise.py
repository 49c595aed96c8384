"""Check that a loss computes each position by itself, if devices run it on different positions."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax

from jaxshard.adapt.positionwise.prove import find_mixing
from jaxshard.adapt.positionwise.report import explain
from jaxshard.core.known_model import KnownModel
from jaxshard.core.layout import Layout, join_model
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import PyTree
from jaxshard.engines.context import prepare
from jaxshard.engines.just_in_time import cast_shapes


def make_position_check(
    layout: Layout,
    fn: Callable[..., Any],
    known: KnownModel | None,
    manual: Set[str],
    *,
    microbatches: int = 1,
    compute_dtype: Any = None,
    with_key: bool = True,
) -> Callable[[PyTree], None]:
    """Make `check(batch)`, which raises if `fn` mixes sequence positions that `js.context` puts on different devices.

    The check reads the jaxpr of `fn`. It takes about as long as tracing `fn` twice, once for each shape of a batch, and
    no time without `js.context`.

    Args:
      layout: the layout, whose `js.context` names the arrays with positions.
      fn: `fn(model, batch, key)` returns a `js.Mean` or `js.Loss`; `fn(model, batch)` metrics if `with_key` is False.
      known: the known model of `fn`, which separates inputs from labels.
      manual: the mesh axes whose names `fn` may use in collectives.
      microbatches: the number of micro-batches into which a device's rows are cut.
      compute_dtype: the dtype of the weights; None for the parameters' own.
      with_key: whether `fn` takes a random key.

    Raises:
      ValueError: when `check` runs, with all operations that mix positions.
    """
    context = layout.context
    parts = 1 if context is None else axis_size(layout.mesh, context.axis)
    passed: set[Any] = set()

    def check(batch: PyTree) -> None:
        if context is None or parts == 1:
            return
        rows = _microbatch_shapes(layout, prepare(layout, known, abstract(batch)), microbatches)
        leaves = jax.tree_util.tree_leaves_with_path(rows)
        shapes = tuple((path_str(path), x.shape, x.dtype) for path, x in leaves)
        if shapes in passed:
            return
        model = join_model(cast_shapes(layout.shapes.params, compute_dtype), layout.shapes.state)
        after = [layout.shapes.key] if with_key else []
        dims = [context.dim_of(path_str(path), len(x.shape)) for path, x in leaves]
        places = [None] * len(jax.tree.leaves(model)) + dims + [None] * len(after)
        sizes = {axis: layout.mesh.shape[axis] for axis in sorted(manual)}
        found = find_mixing(fn, (model, rows, *after), places, parts, axes=context.axis, manual=sizes)
        if found:
            raise ValueError(explain(found, context.axis))
        passed.add(shapes)

    return check


def _microbatch_shapes(layout: Layout, batch: PyTree, microbatches: int) -> PyTree:
    """Return the shapes of one micro-batch of one device.

    An array keeps all rows if their number is not divisible by the number of micro-batches on all devices.
    """
    count = axis_size(layout.mesh, layout.batch_axes) * microbatches

    def shrink(x: Any, has_rows: bool) -> Any:
        if not has_rows or x.shape[0] % count:
            return x
        return jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype)

    return jax.tree.map(shrink, batch, layout.rows_mask(batch))
