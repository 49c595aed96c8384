"""`LowRank`: a frozen matrix and two trained factors, a node that replaces the matrix in a tree of parameters.

    base [in, out]  frozen, in its own dtype, in bf16, or in int8 with a scale [out]
    a    [in, r]    trained                        weight = base + gain * a @ b
    b    [r, out]   trained

In a tree with such nodes only the factors are trained (`choose_trained`), so layouts, engines, optimizers and
checkpoints need no option for LoRA. A matrix may have several dimensions on either side ([in, heads, width]),
and dimensions in front that stack matrices of their own ([blocks, in, out]).

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; for a quantized base Dettmers
et al. 2023, "QLoRA", section 3.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxshard.core.compat import function_primitive
from jaxshard.core.tree import Leaf, map_with_path, path_str
from jaxshard.core.types import PyTree

BaseDtype = Literal["bf16", "int8"]


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class LowRank:
    """A matrix as a frozen base and two trained factors: base + gain * a @ b.

    In the shapes, `*stack` are dimensions that stack several matrices, `*in` and `*out` the dimensions of one matrix.

    Attributes:
      base: the matrix [*stack, *in, *out], in int8 or in a floating dtype.
      a: the first factor, [*stack, *in, rank].
      b: the second factor, [*stack, rank, *out]; zeros at the start.
      scale: for an int8 base the scale of each output channel, [*stack, *out]; else None.
      gain: the factor of a @ b, alpha / rank.
      cast: the dtype to which the base was cast for storage, "bf16" or "int8"; None if it was not. After a cast to bf16
        the weight has the dtype of the factors, otherwise the dtype of base or scale.
    """

    base: Any
    a: Any
    b: Any
    scale: Any
    gain: float
    cast: BaseDtype | None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        names = ("base", "a", "b", "scale")[: 4 if self.cast == "int8" else 3]
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], (self.gain, self.cast)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> LowRank:
        return cls(*arrays, *(() if static[1] == "int8" else (None,)), *static)

    @property
    def stack(self) -> int:
        """The number of leading dimensions that stack several matrices."""
        return int(self.a.ndim + self.b.ndim - 2 - self.base.ndim)

    @property
    def inputs(self) -> int:
        """The number of input dimensions of the matrix: a product with the matrix sums over them."""
        return int(self.a.ndim) - 1 - self.stack

    @property
    def dtype(self) -> Any:
        """The dtype of the weight base + gain * a @ b, in which the model computes."""
        return {None: self.base, "bf16": self.a, "int8": self.scale}[self.cast].dtype

    def weight(self) -> Float[Array, ...]:
        """Return base + gain * a @ b, in the dtype of the weight."""
        return _compute_weight(*jax.tree.leaves(self), gain=self.gain, cast=self.cast)[0]


def is_low_rank(node: Any) -> bool:
    """Return whether a node of a tree is a `LowRank`."""
    return isinstance(node, LowRank)


def has_low_rank(tree: PyTree) -> bool:
    """Return whether a tree has a `LowRank`."""
    return any(map(is_low_rank, jax.tree.leaves(tree, is_leaf=is_low_rank)))


def map_low_rank(fn: Callable[[LowRank], Any], tree: PyTree) -> PyTree:
    """Replace every `LowRank` in a tree by the result of `fn`; keep all other leaves."""
    return jax.tree.map(lambda x: fn(x) if is_low_rank(x) else x, tree, is_leaf=is_low_rank)


def matrix_shapes(tree: PyTree) -> PyTree:
    """Return the shapes and dtypes of a tree, with each `LowRank` as the single matrix that it stands for."""
    return map_low_rank(lambda x: jax.ShapeDtypeStruct(x.base.shape, x.dtype), tree)


def choose_trained(params: PyTree, trainable: Callable[[str], bool] | None) -> PyTree:
    """Return a tree with True for each parameter to train. The base of a `LowRank` is never trained.

    Args:
      params: parameters, or their shapes.
      trainable: `trainable(path)` chooses parameters. None chooses all parameters, or only the factors if the tree has
        a `LowRank`.
    """
    adapted = has_low_rank(params)

    def is_trained(path: Any, x: Any) -> Any:
        if not is_low_rank(x):
            return not adapted if trainable is None else trainable(path_str(path))
        a, b = (trainable is None or trainable(f"{path_str(path)}/{name}") for name in ("a", "b"))
        return replace(x, base=False, a=a, b=b, scale=False)

    return map_with_path(is_trained, params, is_leaf=is_low_rank)


def name_factors(params: PyTree, matrices: PyTree) -> PyTree:
    """Return the parameters as a tree of `Leaf`, with path, shape and dimension names of each array.

    The factors of a `LowRank` get their names from its matrix: ("embed", "mlp") gives ("embed", None) for `a` and
    (None, "mlp") for `b`.

    Args:
      params: parameters, or their shapes.
      matrices: a tree like `params` with one `Leaf` in place of each `LowRank`.
    """

    def name(path: Any, x: Any, matrix: Leaf) -> Any:
        if not is_low_rank(x):
            return matrix
        stack, inputs = matrix.names[: x.stack], matrix.names[x.stack : x.stack + x.inputs]
        outputs = matrix.names[x.stack + x.inputs :]
        names = {
            "base": matrix.names,
            "a": (*stack, *inputs, None),
            "b": (*stack, None, *outputs),
            "scale": (*stack, *outputs),
        }

        def part(path: Any, array: Any) -> Leaf:
            field = path_str(path)
            return Leaf(f"{matrix.path}/{field}", tuple(array.shape), array.dtype, names[field], matrix.named_by)

        return map_with_path(part, x)

    return map_with_path(name, params, matrices, is_leaf=is_low_rank)


# Making them.


def adapt_matrix(
    w: Shaped[Array, ...], key: jax.Array, *, stack: int, inputs: int, rank: int, gain: float, base: BaseDtype | None
) -> LowRank:
    """Convert a matrix to an equal `LowRank`: `a` is drawn from N(0, 1 / in), `b` is zero.

    Args:
      w: the matrix [*stack, *in, *out].
      key: the random key for `a`.
      stack: the number of leading dimensions that stack matrices.
      inputs: the number of input dimensions.
      rank: the rank of the factors.
      gain: the factor of a @ b.
      base: the dtype to which the matrix is cast for storage, "bf16" or "int8"; None keeps its own.
    """
    front, ins, outs = w.shape[:stack], w.shape[stack : stack + inputs], w.shape[stack + inputs :]
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    a = jax.random.normal(key, (*front, *ins, rank), dtype) / math.sqrt(math.prod(ins))
    b = jnp.zeros((*front, rank, *outs), dtype)
    cast = None if base == "bf16" and w.dtype.itemsize <= 2 else base
    stored, scale = cast_base(w, stack, inputs, cast)
    return LowRank(stored, a, b, scale, gain, cast)


def cast_base(w: Shaped[Array, ...], stack: int, inputs: int, cast: BaseDtype | None) -> tuple[Array, Array | None]:
    """Cast a matrix for storage as the base of a `LowRank`; return (base, scale), with the scale None unless int8.

    In int8 each output channel has a scale of its own, the largest magnitude over 127, in the dtype of the matrix. The
    error of an element is at most half the scale, so 1 / 254 of the largest magnitude in its channel.
    """
    if cast != "int8":
        return w if cast is None else w.astype(jnp.bfloat16), None
    summed = tuple(range(stack, stack + inputs))
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    scale = (jnp.abs(wide).max(summed) / 127).astype(w.dtype)
    spread = jnp.expand_dims(scale, summed).astype(wide.dtype)
    # A bf16 scale may be rounded down, so values are clipped to 127; a channel of zeros has a scale of zero.
    numbers = jnp.where(spread > 0, jnp.round(wide / jnp.where(spread > 0, spread, 1)), 0)
    return jnp.clip(numbers, -127, 127).astype(jnp.int8), scale


def key_of_path(key: jax.Array, path: Any) -> jax.Array:
    """Derive a random key for the factors of the matrix at a path.

    No parameter of the model is made from the same key.
    """
    return jax.random.fold_in(jax.random.fold_in(key, 0x10AA), zlib.crc32(path_str(path).encode()) >> 1)


# Using them.


def _compute_weight(*arrays: jax.Array, gain: float, cast: BaseDtype | None) -> list[jax.Array]:
    x = LowRank.tree_unflatten((gain, cast), arrays)
    whole, stack = x.base.astype(x.dtype), tuple(range(x.stack))
    if x.scale is not None:
        whole = whole * jnp.expand_dims(x.scale, tuple(range(x.stack, x.stack + x.inputs)))
    product = lax.dot_general(x.a, x.b, (((x.a.ndim - 1,), (x.stack,)), (stack, stack)))
    return [(whole + gain * product).astype(x.dtype)]


WEIGHT = function_primitive("low_rank_weight", _compute_weight)
"""`LowRank.weight` as one equation, so that a product with it can be found in a jaxpr (`adapt/factored.py`), and so
that a `jax.checkpoint` policy knows it by name: weights are computed again, never saved for the backward pass."""


def bind_weight(x: LowRank) -> jax.Array:
    """Compute base + gain * a @ b as a single equation of a jaxpr, so that code that reads the jaxpr recognises it."""
    made: list[jax.Array] = WEIGHT.bind(*jax.tree.leaves(x), gain=x.gain, cast=x.cast)
    return made[0]


def merge_lora(params: PyTree) -> PyTree:
    """Merge the low-rank factors of `js.lora` into the weights, for the original model.

    It may also be called inside of a traced function, such as `eval_fn`.

    Args:
      params: parameters or a `js.Model` with logical arrays, such as `js.logical(run, layout).params`.

    Returns:
      The tree with base + alpha / rank * a @ b in place of each pair of factors, in the dtype in which the model used
      it. The sum of an int8 base and its factors is not rounded to int8 again. Other leaves are as they were.

    Example:
          merged = js.merge_lora(js.logical(run, layout).params)
          loss = model.loss(merged, batch, key)          # of the original model
    """
    return map_low_rank(LowRank.weight, params)
