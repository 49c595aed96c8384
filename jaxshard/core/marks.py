"""Marks: what a traced program shows in place of functions that know how positions are split over devices.

Under `js.context` each device runs the loss on its own positions. A proof reads the program of the loss, and takes it
that these functions are right by contract: `js.attention` exchanges keys and values itself, `js.positions` knows where
its device's positions lie. In the program that is read they are one equation each:

    a:f32[2,64,8,16] = js_mark[name=js.attention positions=(-3, -3, -3) result_positions=(-3,)] q k v
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax

from jaxshard.core.compat import mark_primitive

_length = jax.make_user_context(default_value=0)

MARK = mark_primitive("js_mark")


def show_marks(length: int) -> AbstractContextManager[None]:
    """Make a context in which functions that know how positions are split leave marks.

    Args:
      length: the number of positions in a row, also where the program is traced for a part of them.
    """
    context: AbstractContextManager[None] = _length(length)
    return context


def is_marking() -> bool:
    """Return whether the program that is traced here is only read, so that functions leave a mark."""
    return bool(_length.value)


def marked_length() -> int:
    """Return the number of positions in a row, all of them, in a program that is only read."""
    length: int = _length.value
    return length


def leave_mark(
    name: str,
    arrays: Sequence[Any],
    dims: Sequence[int | Literal["sum"] | None],
    results: Sequence[jax.ShapeDtypeStruct],
    result_dims: Sequence[int | Literal["sum"] | None],
    how: Any = None,
) -> list[jax.Array]:
    """Show a function in the program by its contract, in a context of `show_marks`, and compute nothing.

    Args:
      name: what the user calls, such as "js.attention".
      arrays: its operands.
      dims: where each operand has its positions, counted from the end (-1 is the last dimension); None for an operand
        without positions, such as a weight; "sum" for a sum over positions.
      results: shapes and dtypes of its results.
      result_dims: where each result has its positions; "sum" if it adds up over positions, None if it is the same on
        all devices.
      how: what else the user said, compared by ==. It must not depend on how many positions there are.

    Returns:
      Arrays like `results`, without values.

    Example:
          if is_marking():
              (out,) = leave_mark("js.attention", (q, k, v), (-3, -3, -3), [like_q], (-3,))
    """
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results)
    marked: list[jax.Array] = MARK.bind(
        *arrays, name=name, positions=tuple(dims), results=avals, result_positions=tuple(result_dims), how=how
    )
    return marked
