"""Marks: single equations in a jaxpr that stand for functions which handle split positions themselves.

Under `js.context` each device runs the loss on its own positions. A proof reads the jaxpr of the loss, and trusts the
contract of these functions: `js.attention` exchanges keys and values itself, `js.positions` returns the positions of
its device. In the jaxpr that is read each of them is one equation:

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
    """Return a context in which functions such as `js.attention` and `js.positions` leave marks in the jaxpr.

    A mark is one equation that stands for a function and says how it treats positions, for proofs that read the jaxpr.

    Args:
      length: the number of positions in a full row, even if the program is traced for fewer positions.
    """
    context: AbstractContextManager[None] = _length(length)
    return context


def is_marking() -> bool:
    """Return True if functions should leave marks: a program is traced only for a proof to read (see `show_marks`)."""
    return bool(_length.value)


def marked_length() -> int:
    """Return the number of positions in a full row, as given to `show_marks`; 0 outside of its context."""
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
    """Add one equation to the jaxpr that stands for a function and says how it treats positions; compute nothing.

    Call it only in a context of `show_marks`.

    Args:
      name: the function that the user calls, such as "js.attention".
      arrays: its operands.
      dims: the dimension of each operand's positions, counted from the end (-1 is the last dimension); None for an
        operand without positions, such as a weight; "sum" for a sum over positions.
      results: shapes and dtypes of its results.
      result_dims: the dimension of each result's positions; "sum" if results add up over positions, None if the result
        is equal on all devices.
      how: the function's other options, compared by ==. It must not depend on the number of positions.

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
