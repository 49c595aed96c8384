"""Mark stacked parameters in a tree, to compare an optimizer's updates of stacked and of separate blocks.

{"embed": x, "blocks": {"w": stacked}}                        the parameters
{"embed": x, "blocks": {"w": Marked([stacked])}}              marked and stacked: one leaf
{"embed": x, "blocks": {"w": Marked([block0, block1])}}       marked and unstacked: one leaf per block
"""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.core.types import PyTree


@jax.tree_util.register_pytree_with_keys_class
class Marked:
    """A tree node that replaces a stacked array [blocks, ...]. Its leaves are the array itself, or one array per block.

    With such nodes an optimizer runs on stacked and on separate blocks with the same masks and labels, because a tree
    that matches the original parameters is a tree prefix of the new tree. The path of every leaf ends with the last key
    of the array's path. The node also has the attributes `shape`, `ndim`, `size` and `dtype` of its first leaf.
    """

    def __init__(self, slices: list[Any], key: Any):
        self.slices, self.key = slices, key

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(self.key, x) for x in self.slices], self.key

    @classmethod
    def tree_unflatten(cls, key: Any, slices: Any) -> Marked:
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


def is_marked(x: Any) -> bool:
    """Return True for a `Marked` node, which replaces a stacked array in a tree."""
    return isinstance(x, Marked)


def has_marks(tree: PyTree) -> bool:
    """Return True if a tree contains a `Marked` node, which replaces a stacked array."""
    return any(map(is_marked, jax.tree.leaves(tree, is_leaf=is_marked)))
