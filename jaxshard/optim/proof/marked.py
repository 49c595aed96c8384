"""Marks of stacked parameters in a tree of otherwise the same structure, for the check of what stacking changes."""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.core.types import PyTree


@jax.tree_util.register_pytree_with_keys_class
class Slices:
    """A stacked array, or its slices, in its place in the tree: a node with a leaf, or with a leaf per block.

    Masks and labels that are trees with the stacked array's structure still fit, as prefixes, and every slice has the
    last key of the array's path. Functions that take the node for an array see the shape of a leaf.
    """

    def __init__(self, slices: list[Any], key: Any):
        self.slices, self.key = slices, key

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(self.key, x) for x in self.slices], self.key

    @classmethod
    def tree_unflatten(cls, key: Any, slices: Any) -> Slices:
        return cls(list(slices), key)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.slices[0].shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(self.slices[0].size)

    @property
    def dtype(self) -> Any:
        return self.slices[0].dtype


def in_slices(tree: PyTree) -> bool:
    """Whether a tree holds marked parameters."""

    def is_slices(x: Any) -> bool:
        return isinstance(x, Slices)

    return any(map(is_slices, jax.tree.leaves(tree, is_leaf=is_slices)))
