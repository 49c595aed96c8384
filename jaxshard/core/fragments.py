"""Fragments of a model: its parameters cut into parts of nearly equal bytes, of which each is synchronised by itself.

A block of a stacked model stays in one piece, as does every array outside the blocks:

    blocks/w [6, 8, 8]      fragment 0: blocks 0 to 2        fragment 1: blocks 3 to 5
    embed [40, 8]           whole                            -
    head [8, 40]            -                                whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxshard.core.placement import Placement
from jaxshard.core.tree import bytes_of, is_stacked, map_with_path
from jaxshard.core.types import PyTree


@dataclass(frozen=True)
class Cut:
    """A part of one array: a run of its blocks, or all of it.

    Attributes:
      start: the first block.
      stop: the one behind the last; None for the whole array.
    """

    start: int = 0
    stop: int | None = None

    def take(self, x: Any, dim: int = 0) -> Any:
        """Slice this part out of an array whose blocks are counted in dimension `dim`."""
        return x if self.stop is None else jax.lax.slice_in_dim(x, self.start, self.stop, axis=dim)

    def put(self, part: Any, x: Any, dim: int = 0) -> Any:
        """Put a part back in its place."""
        return part if self.stop is None else jax.lax.dynamic_update_slice_in_dim(x, part, self.start, dim)

    def shape(self, x: Any) -> jax.ShapeDtypeStruct:
        """Return the abstract array of this part of an array."""
        rows = x.shape if self.stop is None else (self.stop - self.start, *x.shape[1:])
        return jax.ShapeDtypeStruct(rows, x.dtype)

    def placement(self, placement: Placement) -> Placement:
        """Return where this part lies: as the array does."""
        return placement if self.stop is None else placement.resize(0, self.stop - self.start)


Fragment = Any
"""A tree like the parameters: a `Cut` for every array that the fragment has a part of, None for the others."""


def cut_fragments(params: PyTree, count: int) -> tuple[Fragment, ...]:
    """Cut parameters into fragments of nearly equal bytes, by blocks and by whole arrays.

    Args:
      params: the parameters, or their shapes; None in place of those that are left out.
      count: the number of fragments.

    Raises:
      ValueError: there are fewer blocks and arrays than fragments.

    Example:
        first, second = cut_fragments(shapes, 2)
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    stacked = [x for path, x in leaves if x.shape and is_stacked(path)]
    blocks = min((x.shape[0] for x in stacked), default=0)
    blocks = blocks if all(x.shape[0] == blocks for x in stacked) else 0
    sizes = {path: bytes_of(x.shape, x.dtype) for path, x in leaves if not (blocks and x.shape and is_stacked(path))}
    of_block = sum(bytes_of(x.shape, x.dtype) for x in stacked) // blocks if blocks else 0
    # The largest first, each to where the least is so far.
    pieces: list[tuple[int, Any]] = [*((size, path) for path, size in sizes.items()), *[(of_block, None)] * blocks]
    if len(pieces) < count:
        raise ValueError(
            f"fragments={count} of a model with {len(pieces)} pieces (blocks, and arrays outside them): use at most "
            f"{len(pieces)}"
        )
    loads, runs, owner = [0] * count, [0] * count, {}
    for size, path in sorted(pieces, key=lambda piece: -piece[0]):
        least = min(range(count), key=lambda at: (loads[at], runs[at], at))
        loads[least] += max(size, 1)
        if path is None:
            runs[least] += 1
        else:
            owner[path] = least
    return tuple(_fragment(params, at, runs, owner) for at in range(count))


def _fragment(params: PyTree, at: int, runs: list[int], owner: dict[Any, int]) -> Fragment:
    first, blocks = sum(runs[:at]), sum(runs)

    def cut(path: Any, x: Any) -> Cut | None:
        if path in owner:
            return Cut() if owner[path] == at else None
        if not runs[at]:
            return None
        return Cut() if runs[at] == blocks else Cut(first, first + runs[at])

    return map_with_path(cut, params)


def of_fragment(fragment: Fragment, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Return `fn(cut, *leaves)` of every array in a fragment, None for the others, as a tree like the parameters."""

    def apply(cut: Cut | None, *leaves: Any) -> Any:
        return None if cut is None else fn(cut, *leaves)

    return jax.tree.map(apply, fragment, *trees, is_leaf=lambda x: x is None)


def put_fragment(fragment: Fragment, part: PyTree, tree: PyTree, dim: int = 0) -> PyTree:
    """Put the arrays of a fragment into the tree that it was cut from; `dim` counts blocks."""

    def apply(cut: Cut | None, mine: Any, x: Any) -> Any:
        return x if cut is None else cut.put(mine, x, dim)

    return jax.tree.map(apply, fragment, part, tree, is_leaf=lambda x: x is None)


def cut_leaves(fragment: Fragment, params: PyTree) -> Iterator[tuple[Any, Any, Cut]]:
    """List (key path, array, cut) of every array that a fragment has a part of."""
    for (path, x), cut in zip(
        jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: x is None),
        jax.tree.leaves(fragment, is_leaf=lambda x: x is None),
        strict=True,
    ):
        if cut is not None:
            yield path, x, cut
