"""`Dot`: the grouped products that `js.moe` passes to the function of the experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxshard.core.counting import is_counting
from jaxshard.layers.moe.eight_bits import Rounding, rounded_product
from jaxshard.layers.moe.products import Way, group_of_rows, product


class Dot:
    """Grouped products with the matrices of experts, passed by `js.moe` to its function.

    `dot(x, w)` multiplies each of the rows x [rows, C] by its expert's matrix in w [experts, C, H]. `dot.of(b)` selects
    for each row its expert's entry of b [experts, ...], such as a bias.
    """

    def __init__(self, rows: int, sizes_G: jax.Array, way: Way) -> None:
        self._rows = rows
        self._sizes = sizes_G
        self._way = way

    def __call__(
        self,
        x: Float[Array, "rows width"],
        w: Float[Array, "experts width out"],
        rounding: Rounding | None = None,
    ) -> Float[Array, "rows out"]:
        """Multiply each row by its expert's matrix.

        Args:
          x: rows in the order in which `fn` received them.
          w: one matrix for each expert of this device.
          rounding: how both operands are rounded to 8 bits for the product; None for not at all.

        Returns:
          The products, accumulated in f32, in the common dtype.

        Raises:
          ValueError: shapes that do not match, or a `rounding` where a tensor axis splits the hidden units.
        """
        G = self._sizes.shape[0]
        if x.ndim != 2 or w.ndim != 3 or (x.shape[0], G) != (self._rows, w.shape[0]) or x.shape[1] != w.shape[1]:
            raise ValueError(
                f"moe: dot(x, w) multiplies x [rows, width] with w [experts, width, any]; here are {self._rows} rows "
                f"and {G} experts, got x {list(x.shape)} and w {list(w.shape)}; w must be "
                f"[{G}, {x.shape[-1] if x.ndim else 1}, any]"
            )
        dtype = jnp.result_type(x, w)
        x, w = x.astype(dtype), w.astype(dtype)
        if is_counting():
            return x @ w[0]
        if rounding is not None and self._way.tensor:
            raise ValueError(
                f"moe: the products of experts are rounded to 8 bits, with a scale for each row, and the axes "
                f"{list(self._way.tensor)} split the hidden units, so that each device would find another scale; keep "
                "the hidden units whole with the rule ('mlp', 'whole'), or leave the experts out of `quant`"
            )
        if rounding is not None:
            rounded: jax.Array = rounded_product(self._way, rounding, x, w, self._sizes)
            return rounded
        multiplied: jax.Array = product(self._way, False, x, w, self._sizes)
        return multiplied

    def of(self, b: Shaped[Array, "experts ..."]) -> Shaped[Array, "rows ..."]:
        """Select for each row its expert's entry of `b`.

        Raises:
          ValueError: `b` does not have one entry for each expert of this device.
        """
        G = self._sizes.shape[0]
        if b.ndim < 1 or b.shape[0] != G:
            raise ValueError(f"moe: dot.of(b) takes b [experts, ...] of the {G} experts here, got {list(b.shape)}")
        if is_counting():
            return jnp.broadcast_to(b[0], (self._rows, *b.shape[1:]))
        taken: jax.Array = _take(self._rows, b, self._sizes)
        return taken


# The entry of each row's group.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(rows: int, b: jax.Array, sizes_G: jax.Array) -> jax.Array:
    taken: jax.Array = jnp.take(b, group_of_rows(rows, sizes_G), axis=0, mode="clip")
    return taken


def _take_forward(rows: int, b: jax.Array, sizes_G: jax.Array) -> tuple[jax.Array, Any]:
    return _take(rows, b, sizes_G), sizes_G


def _take_backward(rows: int, sizes_G: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    """Sum the rows of the gradient `dy` that belong to each group: [rows, ...] -> [groups, ...].

    `sizes_G` has the number of rows of each group. The sum is a product with a one-hot matrix, since scatters are slow
    on TPUs.
    """
    groups = group_of_rows(rows, sizes_G)
    ones_GM = (groups == jnp.arange(sizes_G.shape[0])[:, None]).astype(dy.dtype)
    dy = jnp.where((groups < sizes_G.shape[0]).reshape(-1, *(1,) * (dy.ndim - 1)), dy, 0)
    summed = jnp.tensordot(ones_GM, dy, 1, preferred_element_type=jnp.promote_types(dy.dtype, jnp.float32))
    return summed.astype(dy.dtype), None


_take.defvjp(_take_forward, _take_backward)
