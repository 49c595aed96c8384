"""Leaves of pytrees with their paths, and errors that name every bad leaf at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.keys import words_of
from jaxshard.core.kinds import group_by_kind
from jaxshard.core.types import PyTree

BLOCKS = "blocks"
"""The key of the stacked parameters of a model made of blocks, and the logical name of their first dimension."""

LAYERS = "layers"
"""The logical name of a dimension that stacks layers, as `nn.scan` and `nn.vmap` do."""

CONTRACTED = "contracted"
"""The logical name of contracted dimensions, if the layer's code shows them and the model does not name them."""

SPATIAL = "spatial"
"""The logical name of the dimensions of a convolution's kernel over which its window extends."""

BY_LAYER = (BLOCKS, LAYERS, CONTRACTED, SPATIAL)
"""Logical names that come from a layer's code, not from the model's own annotations."""


class Leaf(NamedTuple):
    """One array of a tree, without its values.

    Attributes:
      path: its path in the tree, with slashes: "blocks/attention/kernel".
      shape: its logical shape, as in the model.
      dtype: its dtype.
      names: the logical name of each dimension, or None, such as ("embed", "mlp").
      named_by: the rule of `js.tensor` that gave a parameter its names, as text for people; "" without one.

    Example:
        >>> leaf = Leaf("head/kernel", (512, 10), "float32", ("embed", "vocab"))
        >>> leaf.size
        5120
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...]
    named_by: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.inexact)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Return whether a parameter belongs to stacked blocks: its key path begins with "blocks"."""
    return bool(path) and getattr(path[0], "key", None) == BLOCKS


def path_str(path: tuple[Any, ...]) -> str:
    """Join a key path with slashes: params["a"][0].b is "a/0/b"."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def leaf_of(path: tuple[Any, ...], array: Any, names: tuple[str | None, ...] | None = None) -> Leaf:
    """Make the `Leaf` (path, shape, dtype and dimension names) of an array or ShapeDtypeStruct at a key path."""
    shape = tuple(array.shape)
    return Leaf(path_str(path), shape, array.dtype, names or (None,) * len(shape))


def map_with_path(
    fn: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Map a function over the leaves of trees, as `jax.tree.map` does; it receives the leaf's key path first."""
    return jax.tree_util.tree_map_with_path(fn, tree, *rest, is_leaf=is_leaf)


def paths(tree: PyTree) -> list[str]:
    """Return the path of every leaf, in the order of the leaves."""
    return [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def row_count(batch: PyTree) -> int:
    """Return the number of rows: the largest first dimension of a batch's arrays; 0 if all of them are scalars."""
    return max((np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)), default=0)


def find_by_suffix(known: dict[tuple[Any, ...], tuple[tuple[int, ...], Any]], path: tuple[Any, ...], shape: Any) -> Any:
    """Look up a value by the end of an array's key path; the longest end wins, and the shape must agree.

    The path of Adam's moment "0/mu/layer/w" ends with "layer/w", so it finds the value of that parameter.

    Args:
      known: {key path: (shape, value)}, of parameters for example.
      path: the array's key path.
      shape: the array's shape.

    Returns:
      The value for the longest end of the path that is in `known` with this shape; None if there is none.
    """
    for start in range(len(path) + 1):
        known_shape, value = known.get(path[start:], (None, None))
        if value is not None and known_shape == tuple(shape):
            return value
    return None


def raise_all(problems: Iterable[str], error: type[Exception], headline: str) -> None:
    """Raise one error of class `error` that lists all problems below a headline; do nothing if there are none."""
    found = list(problems)
    if found:
        raise error(headline + "".join(f"\n  - {problem}" for problem in found))


def check_same_tree(expected: PyTree, received: PyTree, what: str, fix: str) -> None:
    """Raise unless both trees have the same leaves with the same shapes and dtypes.

    Args:
      expected: a tree of arrays or ShapeDtypeStructs.
      received: the tree to compare.
      what: the beginning of the message: what is wrong if they differ.
      fix: how to fix it.

    Raises:
      ValueError: they differ; the message names every such leaf, with both shapes and dtypes.
    """
    want = {path_str(p): x for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    got = {path_str(p): x for p, x in jax.tree_util.tree_leaves_with_path(received)}
    problems = [f"{path}: missing, expected {_describe(want[path])}" for path in want if path not in got]
    problems += [f"{path}: unexpected, {_describe(got[path])}" for path in got if path not in want]
    for path in want:
        if path in got and _kind(want[path]) != _kind(got[path]):
            problems.append(f"{path}: expected {_describe(want[path])}, got {_describe(got[path])}")
    if not problems and not same_structure(expected, received):
        problems.append(f"expected {jax.tree.structure(expected)}, got {jax.tree.structure(received)}")
    raise_all(problems, ValueError, f"{what}; {fix}")


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Return whether two trees have the same structure."""
    first: Any = jax.tree.structure(a)
    return bool(first == jax.tree.structure(b))


def _kind(array: Any) -> tuple[Any, tuple[int, ...]]:
    return jnp.result_type(array), jnp.shape(array)


def _describe(array: Any) -> str:
    dtype, shape = _kind(array)
    return f"{dtype}{list(shape)}"


def bytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array without padding; for random keys, the bytes of their uint32 words."""
    words = words_of(jax.ShapeDtypeStruct(shape, dtype))
    return int(math.prod(words.shape) * jnp.dtype(words.dtype).itemsize)


def check_arrays(what: str, tree: PyTree) -> None:
    """Raise a TypeError that names every leaf of a tree that is neither an array nor a number.

    Args:
      what: the name of the tree, for the message.
      tree: the tree.
    """
    bad = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if not _is_numeric(x)]
    groups = group_by_kind(bad, lambda leaf: leaf[0], lambda leaf: type(leaf[1]).__name__)
    raise_all(
        (
            f"{path}: {kind} {repr(same[0][1])[:40]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}"
            for (path, kind), same in groups.items()
        ),
        TypeError,
        f"{what} must be a tree of arrays and numbers; leave out, or keep beside it, these leaves",
    )


def _is_numeric(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:  # a Python number; jnp.result_type would take a string for the name of a dtype
        return isinstance(x, (bool, int, float, complex))
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))


def abstract(tree: PyTree) -> PyTree:
    """Replace every array of a tree by its shape and dtype."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
