"""`js.context`: the strategy that splits the positions of a batch, and its combination with others in `js.compose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from jaxshard.core.mesh import axis_names
from jaxshard.core.several_axes import axes_in_a_tuple
from jaxshard.core.strategy_parts import Batch, Context, Pipeline, Strategy, Tensor
from jaxshard.core.types import AxisName

ContextForm = Literal["gather", "ulysses", "usp", "ring"]

CONTEXT_DIMS: Mapping[str, int] = {"tokens": 1, "targets": 1, "weights": 1, "positions": 1, "segment_ids": 1}
"""Default of `js.context(dims=)`: the arrays of a batch that have positions, and the dimension of the positions."""


@axes_in_a_tuple
def context(
    axis: AxisName = "context", *, dims: Mapping[str, int | None] = CONTEXT_DIMS, how: ContextForm = "gather"
) -> Strategy:
    """Context parallelism: each device computes a part of the positions of every row, for rows too long for one device.

    Every layer but attention computes each position by itself, and `js.attention` communicates keys and values. The
    positions are divided so that causal attention is the same work on each of n devices: a row is cut into 2n chunks,
    and device i has the chunks i and 2n - 1 - i. So a row must have a multiple of 2n positions.

    Batches are stored replicated over the axis. In `js.compose` the axis never splits rows, even if another strategy
    has it among its axes. It may split other arrays: `js.fsdp(("data", "context"))` splits rows over data alone, and
    parameters over both axes. Losses, metrics and gradients are summed over the axis, as over the batch axes.

    Outside of `js.attention` a loss must compute each position by itself, and it must read positions from the batch or
    from `js.positions`. Labels must be an array of their own: {"tokens": [B, T], "targets": [B, T]}, not one array of
    T + 1 tokens, since no device could shift its part. (The models of `js.models` take both.) Under `js.auto` any
    attention is right, because the loss sees all positions there.

    Args:
      axis: a mesh axis, or a tuple of axes that split the positions together; a pair of them for "usp".
      dims: the arrays of a batch that have positions, by the last name of their path, and in which dimension. An array
        of fewer dimensions, such as weights [rows], has no positions. None in place of the dimension means the same.
      how: how attention sees the keys and values of other devices. "gather" gathers all of them. "ulysses" exchanges
        heads for positions (all-to-all), "usp" gathers over the first axis and exchanges over the second, and "ring"
        passes them around.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis.

    Raises:
      ValueError: no such form, another number of axes than two for "usp", or a dimension below 1 (0 has the rows).
      TypeError: `dims` is no mapping of names to dimensions.

    References:
      Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, for gathered keys and values; Jacobs et al.
      2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP"; Liu et al. 2023, "Ring Attention".

    Example:
        mesh = js.make_mesh(data=2, context=4)
        strategy = js.compose(js.fsdp(("data", "context")), js.context("context"))
    """
    names = axis_names(axis)
    if how not in get_args(ContextForm):
        raise ValueError(f"context: how must be one of {', '.join(map(repr, get_args(ContextForm)))}, got {how!r}")
    if how == "usp" and len(names) != 2:
        raise ValueError(
            f"context: 'usp' gathers over one mesh axis and exchanges heads over another; name two, such as "
            f"js.context(('gather', 'heads'), how='usp'), got {axis!r}"
        )
    if not isinstance(dims, Mapping) or any(
        not isinstance(name, str) or isinstance(dim, bool) or not isinstance(dim, int | None)
        for name, dim in dims.items()
    ):
        raise TypeError(
            f'context: dims must be names with the dimension of positions, such as {{"x": 1}}, got {dims!r}'
        )
    if rows := {name: dim for name, dim in dims.items() if dim is not None and dim < 1}:
        raise ValueError(f"context: dims must be at least 1, for dimension 0 has the rows, got {rows}")
    return Context(names, tuple(dims.items()), how)


def rows_without_context(parts: Sequence[Strategy]) -> Sequence[Strategy]:
    """Remove the axes of `js.context` from the `js.batch` parts of a strategy, so that they do not split rows.

    Raises:
      ValueError: parts that can't be combined with `js.context`.
    """
    contexts = [part for part in parts if isinstance(part, Context)]
    if not contexts:
        return parts
    if len(contexts) > 1:
        axes = ", ".join(repr(axis) for part in contexts for axis in part.axis)
        raise ValueError(f"compose: js.context is given twice, with the axes {axes}; name all at once: ({axes})")
    taken = contexts[0].axis
    for part in parts:
        if isinstance(part, (Tensor, Pipeline)) and set(taken) & set(axis_names(part.axis)):
            raise ValueError(
                f"compose: js.context over {list(taken)} and js.{type(part).__name__.lower()} over {part.axis!r} split "
                "different things over one axis; give each an axis of its own"
            )
    kept: list[Strategy] = []
    for part in parts:
        if isinstance(part, Batch):
            rows = tuple(axis for axis in part.axes if axis not in taken)
            kept += [replace(part, axes=rows)] if rows else []
        else:
            kept.append(part)
    return kept
