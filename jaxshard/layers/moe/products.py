"""Grouped matrix products: multiply each row by the matrix of its group, with rows sorted by group.

    x [M, C]   a a a b c c . .       sizes [3, 1, 2]: rows 0-2 times w[0], row 3 times w[1], rows 4-5 times w[2];
                                     the rows after these have no group, and undefined results

`jax.lax.ragged_dot` computes the same, but compilers expand it to one full product per group: on CPUs always, on TPUs
for the gradient of the matrices (`benchmarks/moe.py` has the figures). So TPUs use the Pallas kernels of megablox,
other platforms a loop over blocks of rows; both compute only the rows of each group.

Shape suffixes: M rows, G groups, C the size of a row, H the size of a result's row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Way(NamedTuple):
    """The implementation of grouped matrix products to use.

    Attributes:
      platform: the platform of the devices: "tpu" for Pallas kernels, any other for a loop over blocks of rows.
      full: True if every row has a group, so that no result needs to be zeroed.
      tensor: the mesh axes that split the hidden units of all experts.
    """

    platform: str
    full: bool = False
    tensor: tuple[str, ...] = ()


def group_of_rows(rows: int, sizes_G: jax.Array) -> jax.Array:
    """Return the group of each row, int32[rows], if the rows are sorted by group: sizes [3, 1], 5 rows -> 0 0 0 1 2.

    Rows without a group, at the end, get the index after the last group.
    """
    ends = jnp.cumsum(sizes_G)
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right", method="compare_all").astype(
        jnp.int32
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(way: Way, transposed: bool, x_MC: jax.Array, w: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiply each row by the matrix of its group, x[i] @ w[group of i], or by its transpose if `transposed`."""
    if way.platform == "tpu":
        y = _by_megablox(x_MC, w, sizes_G, transposed)
        # The kernel does not write rows without a group, which are uninitialized memory.
        return y if way.full else jnp.where((jnp.arange(y.shape[0]) < sizes_G.sum())[:, None], y, 0)
    return _in_blocks(x_MC, w, sizes_G, transposed, jnp.promote_types(x_MC.dtype, jnp.float32), x_MC.dtype)


def multiply_bytes(way: Way, x_MC: jax.Array, w: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiply rows of 8-bit numbers by the matrices of their groups, also of 8-bit numbers; return f32.

    Integers are added in int32. The kernels of megablox take no 8-bit numbers, so TPUs use `jax.lax.ragged_dot`.
    """
    added = jnp.dtype(jnp.int32 if jnp.issubdtype(x_MC.dtype, jnp.integer) else jnp.float32)
    if way.platform == "tpu":
        y = jax.lax.ragged_dot(x_MC, w, sizes_G, preferred_element_type=added)
        return y.astype(jnp.float32)
    return _in_blocks(x_MC, w, sizes_G, False, added, jnp.dtype(jnp.float32))


def _product_forward(way: Way, transposed: bool, x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
    return product(way, transposed, x, w, sizes), (x, w, sizes)


def _product_backward(way: Way, transposed: bool, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return (*differentiate(way, transposed, kept, dy), None)


def differentiate(way: Way, transposed: bool, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `product` with respect to rows and matrices.

    Args:
      way: how grouped products are computed.
      transposed: the argument of the product.
      kept: (rows, matrices, number of rows of each group), the arguments of the product.
      dy: the gradient with respect to its result.
    """
    x, w, sizes = kept
    dx = product(way, not transposed, dy, w, sizes)
    left, right = (dy, x) if transposed else (x, dy)
    outer = _outer_by_megablox if way.platform == "tpu" else _outer_in_blocks
    return dx, outer(left, right, sizes, w.dtype)


product.defvjp(_product_forward, _product_backward)


# The kernels for TPUs.


def _pad(x_MC: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x_MC, ((0, -x_MC.shape[0] % multiple), (0, 0)))


def _tiling(rows: int, width: int, out: int, dtype: Any) -> tuple[int, int, int]:
    """Return the tile sizes (rows, C, H) for products [rows, C] @ [C, H] in the TPU kernels.

    They are chosen so that the double buffers take 10 MB of VMEM. C is `width`, H is `out`.
    """
    side = 1024 if jnp.dtype(dtype).itemsize <= 2 else 512
    return min(512, -(-rows // 128) * 128), min(side, width), min(side, out)


def _by_megablox(x_MC: jax.Array, w: jax.Array, sizes_G: jax.Array, transposed: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    (M, C), H = x_MC.shape, w.shape[1] if transposed else w.shape[2]
    tiling = _tiling(M, C, H, x_MC.dtype)
    y: jax.Array = gmm(_pad(x_MC, tiling[0]), w, sizes_G, x_MC.dtype, tiling, transpose_rhs=transposed)
    return y[:M]


def _outer_by_megablox(x_MC: jax.Array, y_MH: jax.Array, sizes_G: jax.Array, dtype: Any) -> jax.Array:
    """Return x^T y summed over the rows of each group, [G, C, H], by a TPU kernel; zeros for a group without rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (M, C), H = x_MC.shape, y_MH.shape[1]
    tiling = _tiling(M, C, H, x_MC.dtype)
    x_MC, y_MH = (_pad(rows, tiling[0]) for rows in (x_MC, y_MH))
    outer: jax.Array = tgmm(x_MC.swapaxes(0, 1), y_MH, sizes_G, dtype, tiling)
    return outer


# The loop over blocks of rows.


def _block_size(rows: int, groups: int) -> int:
    """Return the number of rows of a block: a power of two from 8 to 512, about a quarter of an average group.

    The last block of a group is half empty on average, so about 1/8 of the work is wasted at most.
    """
    # bit_length() - 1 is the floor of the binary logarithm.
    return 1 << max(3, min(9, (rows // max(1, 4 * groups)).bit_length() - 1))


def _blocks(rows: int, sizes_G: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Divide the rows of each group into blocks of `block` rows; the last block of a group may extend beyond it.

    Returns:
      (the group of each block, the first row of each block, the end of each group [G], the number of blocks). The first
      two are padded to a static length: the number of blocks that the worst group sizes would need.
    """
    ends = jnp.cumsum(sizes_G)
    count = -(-sizes_G // block)
    last = jnp.cumsum(count)
    i = jnp.arange(rows // block + sizes_G.shape[0])  # as many blocks as any sizes need: at most one partial per group
    group = jnp.minimum(jnp.searchsorted(last, i, side="right", method="compare_all"), sizes_G.shape[0] - 1)
    first = ends[group] - sizes_G[group] + (i - (last[group] - count[group])) * block
    return group, first, ends, last[-1]


def _rows_at(x_MC: jax.Array, first: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_MC, first, block)


def _in_blocks(
    x_MC: jax.Array, w: jax.Array, sizes_G: jax.Array, transposed: bool, accumulated: Any, dtype: Any
) -> jax.Array:
    """Return the products, added in the dtype `accumulated`, in the dtype `dtype`."""
    M, block = x_MC.shape[0], _block_size(x_MC.shape[0], w.shape[0])
    group, first, _, count = _blocks(M, sizes_G, block)
    x = jnp.pad(x_MC, ((0, block), (0, 0)))

    # A block that extends beyond its group writes wrong rows of the next groups, whose blocks overwrite them later.
    def write(i: jax.Array, y: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(w, group[i], keepdims=False)
        part = jax.lax.dot_general(
            _rows_at(x, first[i], block),
            matrix,
            (((1,), (1 if transposed else 0,)), ((), ())),
            preferred_element_type=accumulated,
        )
        return jax.lax.dynamic_update_slice_in_dim(y, part.astype(y.dtype), first[i], 0)

    y = jnp.zeros((M + block, w.shape[1] if transposed else w.shape[2]), dtype)
    written: jax.Array = jax.lax.fori_loop(0, count, write, y)
    return written[:M]


def _outer_in_blocks(x_MC: jax.Array, y_MH: jax.Array, sizes_G: jax.Array, dtype: Any) -> jax.Array:
    """Return x^T y summed over the rows of each group, [G, C, H], by a loop over blocks of rows.

    Zeros for a group without rows.
    """
    block = _block_size(x_MC.shape[0], sizes_G.shape[0])
    group, first, ends, count = _blocks(x_MC.shape[0], sizes_G, block)
    x, y = (jnp.pad(rows, ((0, block), (0, 0))) for rows in (x_MC, y_MH))
    accumulated = jnp.promote_types(x.dtype, jnp.float32)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        own = (first[i] + jnp.arange(block) < ends[group[i]])[:, None]
        # Mask both: rows without a group are undefined, and 0 * NaN is NaN.
        left, right = (jnp.where(own, _rows_at(rows, first[i], block), 0) for rows in (x, y))
        part = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=accumulated)
        added: jax.Array = sums.at[group[i]].add(part)
        return added

    sums = jnp.zeros((sizes_G.shape[0], x.shape[1], y.shape[1]), accumulated)
    summed: jax.Array = jax.lax.fori_loop(0, count, add, sums)
    return summed.astype(dtype)
