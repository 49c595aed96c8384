"""Arrays of other libraries (torch, TensorFlow, pandas) as NumPy arrays, without importing any of them.

They have the protocols `__array__` and `__dlpack__`. NumPy reads the first; JAX reads the second, and knows
bfloat16, which NumPy does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.tree import check_arrays, path_str, raise_all
from jaxshard.core.types import PyTree

_OURS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes, jax.ShapeDtypeStruct)


def as_arrays(what: str, tree: PyTree) -> PyTree:
    """Convert arrays of other libraries, such as torch, to NumPy arrays (see `convert_foreign`).

    Raises:
      TypeError: leaves that are neither arrays nor numbers, or arrays that can't be read.
    """
    if all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)):  # as in most steps
        return tree
    tree = convert_foreign(what, tree)
    check_arrays(what, tree)
    return tree


def convert_foreign(what: str, tree: PyTree) -> PyTree:
    """Convert arrays of other libraries to NumPy arrays; arrays of JAX and NumPy and Python numbers stay as they are.

    A mapping that is no pytree node for JAX, such as the `BatchEncoding` of a Hugging Face collator, becomes a
    dictionary.

    Args:
      what: the name of the tree, for messages.
      tree: the tree.

    Returns:
      The converted tree. An array on a CPU shares its memory with the input.

    Raises:
      TypeError: an array that can't be read, such as one that requires a gradient; each is named with the reason.
    """
    if all(isinstance(x, _OURS) for x in jax.tree.leaves(tree)):
        return tree
    tree = jax.tree.map(lambda x: dict(x) if isinstance(x, Mapping) else x, tree)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    problems: list[str] = []
    converted = [_convert(path, x, problems) for path, x in leaves]
    raise_all(problems, TypeError, f"{what} has arrays that can't be read; pass NumPy arrays")
    return jax.tree.unflatten(structure, converted)


def _convert(path: tuple[Any, ...], x: Any, problems: list[str]) -> Any:
    if isinstance(x, _OURS) or not (hasattr(x, "__array__") or hasattr(x, "__dlpack__")):
        return x
    reasons = []
    readers: tuple[Callable[[Any], np.ndarray], ...] = (np.asarray, lambda x: np.asarray(jnp.from_dlpack(x)))
    for read in readers:
        try:
            array = read(x)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            reasons.append(str(error).split("\n")[0])
            continue
        if array.dtype != object:  # what NumPy makes of an object whose __array__ it does not understand
            return array
    kind = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
    problems.append(f"{path_str(path)}: {kind}: {reasons[0] if reasons else 'its elements are objects'}")
    return x
