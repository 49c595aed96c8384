"""Products of rows with the matrices of their experts in 8 bits, with scales by row and by output channel.

Shape suffixes: M rows, G groups, C the size of a row, H the size of a result's row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.layers.moe.products import Way, differentiate, group_of_rows, multiply_bytes


class Rounding(NamedTuple):
    """The rounding of both operands of a product to 8 bits, in the words of qwix.

    Attributes:
      dtype: the dtype of the rounded numbers, such as "int8".
      rows_method: how the scale of a row is found, such as "absmax".
      matrices_method: how the scale of a matrix' output channel is found.
    """

    dtype: str
    rows_method: str = "absmax"
    matrices_method: str = "absmax"


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rounded_product(way: Way, rounding: Rounding, x_MC: jax.Array, w_GCH: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiply each row by the matrix of its group, both rounded to 8 bits; the gradient ignores the rounding.

    Args:
      way: how grouped products are computed.
      rounding: how rows and matrices are rounded.
      x_MC: the rows, sorted by group.
      w_GCH: the matrices.
      sizes_G: the number of rows of each group.

    Returns:
      The products [M, H] in the dtype of `x_MC`.
    """
    import qwix

    x = qwix.quantize(x_MC, rounding.dtype, channelwise_axes=(0,), calibration_method=rounding.rows_method)
    w = qwix.quantize(w_GCH, rounding.dtype, channelwise_axes=(0, 2), calibration_method=rounding.matrices_method)
    scales_MH = jnp.take(w.scale[:, 0], group_of_rows(x_MC.shape[0], sizes_G), axis=0, mode="clip")
    product = multiply_bytes(way, x.qvalue, w.qvalue, sizes_G)
    rounded: jax.Array = (product * x.scale * scales_MH).astype(x_MC.dtype)
    return rounded


def _forward(way: Way, rounding: Rounding, x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
    return rounded_product(way, rounding, x, w, sizes), (x, w, sizes)


def _backward(way: Way, rounding: Rounding, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return (*differentiate(way, False, kept, dy), None)


rounded_product.defvjp(_forward, _backward)
