"""Compute x @ (base + a b) as x @ base + (x @ a) @ b in any traced function.

A `LowRank` is a frozen base matrix with low-rank factors a and b (LoRA). The user's function receives its weight, base
+ a b, as an ordinary array, the result of the primitive `WEIGHT`. The function's jaxpr is then evaluated with every
product with this array replaced:

    w = low_rank_weight base a b        ->     y = dot_general x base;  t = dot_general x a;  u = dot_general t b
    y = dot_general x w                        y + gain * u

So neither the weight nor its gradient, both as large as the base, is ever computed. Only the gradients of `a` and `b`
are reduced over devices. Between `WEIGHT` and the product the weight may be cast, transposed, or passed through a
`jax.jit` or `jax.checkpoint`. For any other use (a lookup of rows, a convolution, a loop over layers) the weight is
computed, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.jaxpr import (
    CALLS,
    PLAIN_CALLS,
    Program,
    bind,
    checkpoint_again,
    equations_inside,
    evaluate,
    is_checkpoint,
)
from jaxshard.core.low_rank import WEIGHT, LowRank, bind_weight, has_low_rank, map_low_rank
from jaxshard.core.types import PyTree


def factor_products(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wrap `fn(params, *args)` so that matrices in `params` may be given as base and low-rank factors (`LowRank`).

    `fn` still sees ordinary arrays, but its products with these matrices are computed from base and factors.
    """

    def run(params: PyTree, *args: PyTree) -> PyTree:
        if not has_low_rank(params):
            return fn(params, *args)
        return run_factored(lambda params, *args: fn(map_low_rank(bind_weight, params), *args), params, *args)

    return run


def run_factored(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call `fn`, and compute its products x @ (base + a b) as x @ base + (x @ a) @ b.

    The matrices base + a b are the arrays that `fn` makes from a `LowRank` by `bind_weight`.
    """
    program = Program.trace(fn, *args)
    return program.results([_whole(x) for x in evaluate(program.closed, jax.tree.leaves(args), _results)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Factored:
    """A matrix base + a b that has not been computed, with the transpose and cast to apply to it.

    Attributes:
      matrix: base and factors of a single matrix (not a stack of matrices).
      order: the transpose: dimension i of the transposed matrix is dimension `order[i]` of `matrix`.
      dtype: the dtype after the cast.
    """

    matrix: LowRank
    order: tuple[int, ...] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    def may_become(self, dtype: Any) -> bool:
        """Return True if products with the matrix may cast base and factors to `dtype`, instead of the computed matrix.

        False after a cast to fewer bits if `dtype` has more bits, because the first cast rounds, and must not be
        skipped.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return False
        return self.dtype == self.matrix.dtype or jnp.finfo(dtype).bits <= jnp.finfo(self.dtype).bits

    def whole(self) -> jax.Array:
        return bind_weight(self.matrix).transpose(self.order).astype(self.dtype)


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, _Factored) else x


def _results(eqn: Any, operands: list[Any]) -> list[Any]:
    """Evaluate an equation of a jaxpr, without computing matrices base + a b where this can be avoided.

    A result is a `_Factored` (a matrix not yet computed) if the equation makes, transposes or casts such a matrix.
    """
    name, params = eqn.primitive.name, eqn.params
    if eqn.primitive is WEIGHT:
        x = LowRank.tree_unflatten((params["gain"], params["cast"]), operands)
        if not x.stack:
            return [_Factored(x, tuple(range(x.base.ndim)), x.dtype)]
    elif any(isinstance(x, _Factored) for x in operands) or _makes_weight(eqn):
        if name in PLAIN_CALLS:
            return evaluate(params[CALLS[name]], operands, _results)
        if is_checkpoint(eqn):
            return _run_checkpoint(eqn, operands)
        if name == "dot_general":
            return [_multiply(operands, params)]
        if name == "transpose":
            (w,) = operands
            return [replace(w, order=tuple(w.order[dim] for dim in params["permutation"]))]
        if name == "convert_element_type" and operands[0].may_become(params["new_dtype"]):
            return [replace(operands[0], dtype=params["new_dtype"])]
    return bind(eqn, list(map(_whole, operands)))


def _makes_weight(eqn: Any) -> bool:
    return any(inner.primitive is WEIGHT for inner in equations_inside(eqn))


def _run_checkpoint(eqn: Any, operands: list[Any]) -> list[Any]:
    def body(*operands: Any) -> list[Any]:
        return [_whole(x) for x in evaluate(eqn.params["jaxpr"], operands, _results)]

    return checkpoint_again(eqn, body, eqn.params["policy"])(*operands)


def _multiply(operands: list[Any], params: dict[str, Any]) -> Any:
    """Multiply an array by a matrix base + a b from base and factors: x @ base + (x @ a) @ b.

    This is possible if the product contracts all input dimensions or all output dimensions of the matrix, and no
    others. Otherwise compute the matrix first.

    Args:
      operands: the two operands of a `dot_general`, one of them a `_Factored`.
      params: the parameters of the `dot_general`.
    """
    side = next(i for i, x in enumerate(operands) if isinstance(x, _Factored))
    w, x, matrix = operands[side], _whole(operands[1 - side]), operands[side].matrix
    contracted, batched = params["dimension_numbers"]
    # {contracted dimension of the matrix: dimension of x}, in the order of the matrix.
    pairs = dict(sorted((w.order[dim], at) for dim, at in zip(contracted[side], contracted[1 - side], strict=True)))
    inputs = tuple(range(matrix.inputs))
    outputs = tuple(range(matrix.inputs, matrix.base.ndim))
    if batched[0] or tuple(pairs) not in (inputs, outputs):
        return lax.dot_general_p.bind(*map(_whole, operands), **params)

    def product(x: jax.Array, y: jax.Array, x_dims: Sequence[int], y_dims: Sequence[int], dtype: Any) -> jax.Array:
        numbers = (tuple(x_dims), tuple(y_dims)), ((), ())
        made: jax.Array = lax.dot_general(
            x, y.astype(w.dtype), numbers, precision=params["precision"], preferred_element_type=dtype
        )
        return made

    dims, free, dtype = tuple(pairs.values()), x.ndim - len(pairs), params["preferred_element_type"]
    forward, scale = tuple(pairs) == inputs, matrix.scale
    a, b = matrix.a, matrix.b
    first, second = (a, b) if forward else (jnp.moveaxis(b, 0, -1), jnp.moveaxis(a, -1, 0))
    # Multiply the scale of an int8 base (one per output) into x or y, which are smaller than the base.
    scaled = x if forward or scale is None else x * lax.broadcast_in_dim(scale.astype(x.dtype), x.shape, dims)
    y = product(scaled, matrix.base, dims, tuple(pairs), dtype)
    if forward and scale is not None:
        y = y * scale.astype(y.dtype)
    small = product(x, first, dims, range(len(dims)), None) * matrix.gain
    y = y + product(small, second, (free,), (0,), dtype)
    # y is now [free dimensions of x, free dimensions of the matrix in its own order]; bring it to the order of w and of
    # the operands.
    left = [dim for dim in range(matrix.base.ndim) if dim not in pairs]
    of_w = [free + left.index(dim) for dim in w.order if dim not in pairs]
    of_x = list(range(free))
    return y.transpose(of_w + of_x if side == 0 else of_x + of_w)
