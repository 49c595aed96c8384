"""A batch, planned once for its shapes: which arrays have rows, and where each array is placed.

The rows are the first dimension, which is split over devices and cut into micro-batches.

Scalars have no rows, nor have the arrays that `js.without_rows` names. All other arrays should have the same number of
rows. If their first sizes differ, only the arrays of one size have rows. This is allowed only if the loss sees the
global batch, because then the choice can't change its value.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.core.apply_strategy import place_batch
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, whole
from jaxshard.core.rules import ends_with
from jaxshard.core.strategy_parts import Strategy, WithoutRows, parts_of
from jaxshard.core.tree import leaf_of, map_with_path, path_str, paths
from jaxshard.core.types import PyTree


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Which arrays of a batch have rows, and where each array is placed; `Layout.plan_batch` makes it.

    One plan serves all batches of the same shapes.

    Attributes:
      strategy: the strategy of the layout; `js.without_rows` in it names arrays without rows.
      mesh: the mesh of the layout.
      axes: the mesh axes that split the rows.
      batch: the arrays' shapes, a tree.
    """

    strategy: Strategy
    mesh: Mesh
    axes: tuple[str, ...]
    batch: PyTree

    @cached_property
    def counts(self) -> dict[str, int]:
        """The size of dimension 0 of every array that may have rows, by path; see `row_counts`."""
        return row_counts(self.strategy, self.batch)

    @cached_property
    def row_count(self) -> int:
        """The number of rows; 0 if no array has rows.

        If arrays differ in their first sizes, the number is one of these sizes. Sizes that the devices divide evenly
        come first, then the most frequent size, then the largest size.
        """
        sizes, parts = Counter(self.counts.values()), axis_size(self.mesh, self.axes)
        return max(sizes, key=lambda size: (size % parts == 0, sizes[size], size), default=0)

    @cached_property
    def rows(self) -> PyTree:
        """A tree like the batch, with True for every array that has rows."""
        count = self.row_count
        return map_with_path(lambda path, x: x.shape[:1] == (count,) and path_str(path) in self.counts, self.batch)

    @cached_property
    def placements(self) -> PyTree:
        """A tree like the batch, with the placement of every array; arrays without rows are replicated."""

        def place(path: tuple[Any, ...], x: Any, has_rows: bool) -> Placement:
            leaf = leaf_of(path, x)
            return place_batch(self.strategy, leaf, self.mesh) if has_rows else whole(leaf)

        return map_with_path(place, self.batch, self.rows)

    @cached_property
    def shardings(self) -> PyTree:
        """A tree like the batch, with the `NamedSharding` of every array."""
        return jax.tree.map(lambda placement: placement.sharding(self.mesh), self.placements)

    def check(self, microbatches: int, *, whole: bool = False) -> None:
        """Raise if the batch has no rows that split evenly over devices and micro-batches; call it before compilation.

        Args:
          microbatches: the engine's number of micro-batches.
          whole: True if the loss sees the global batch. Then arrays may have different first sizes, with a warning that
            names the arrays that are replicated.

        Raises:
          TypeError: the batch has a list of numbers in place of an array.
          ValueError: no array has rows, they have different numbers of rows, or devices and micro-batches do not divide
            the rows.
        """
        check_no_lists("the batch", self.batch)
        if not self.counts:
            raise ValueError(_describe_no_rows(self.batch))
        count, devices = self.row_count, axis_size(self.mesh, self.axes)
        if len(set(self.counts.values())) > 1:
            fix = name_those_without(self.counts, count)
            if not whole:
                raise ValueError(
                    f"{describe_differing(self.counts)}; use js.auto() without micro-batches, whose loss sees the "
                    f"whole batch, or {fix}"
                )
            others = ", ".join(f"{path}: {size}" for path, size in self.counts.items() if size != count)
            if devices > 1:
                warnings.warn(
                    f"arrays of the batch differ in their first sizes: {count} is taken for the number of rows, which "
                    f"devices share, and these are replicated: {others}. To choose yourself, {fix}",
                    stacklevel=4,
                )
        _ = self.placements  # raises where the strategy can't place an array
        parts = microbatches * devices
        if count == 0 or count % parts:
            raise ValueError(
                f"a batch of {count} rows does not divide into {microbatches} micro-batches over {devices} "
                f"devices; use a multiple of {parts} rows, such as {max(parts, count + -count % parts)}"
            )


def row_counts(strategy: Strategy, batch: PyTree) -> dict[str, int]:
    """Return {path: size of dimension 0} of the arrays that may have rows.

    Scalars and the arrays that `js.without_rows` names have no rows.
    """
    patterns = _patterns(strategy)
    arrays = ((path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(batch) if np.ndim(x))
    return {path: np.shape(x)[0] for path, x in arrays if not any(ends_with(path, one) for one in patterns)}


def check_several_batches(who: str, batches: Any) -> None:
    """Raise TypeError if `batches` is a single batch (a tree or an array) and not an iterable of batches.

    Args:
      who: the function that received it, for the message.
      batches: the argument of the user.
    """
    is_one = isinstance(batches, Mapping | str | bytes) or hasattr(batches, "__array__")
    if not is_one and (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        return
    given = f"a {type(batches).__name__}"
    if isinstance(batches, Mapping):
        given += f" with {', '.join(map(str, list(batches)[:4]))}"
    one = "" if isinstance(batches, str | bytes) or callable(batches) else "; one batch alone is [batch]"
    raise TypeError(f"{who}: batches must be an iterable of batches, got {given}; give js.batches(...) or a list{one}")


def check_no_lists(what: str, tree: PyTree) -> None:
    """Raise TypeError for lists of Python numbers in a batch: JAX would take each number for a scalar of its own.

    Refuse a list if it contains lists, if it has as many numbers as some array has rows, or if no array has rows. Other
    lists may be meant as scalars.

    Args:
      what: the name of the tree, for the message.
      tree: a batch, or an example.
    """
    if not any(np.ndim(x) == 0 for x in jax.tree.leaves(tree)):
        return
    sizes = {np.shape(x)[0] for x in jax.tree.leaves(tree) if np.ndim(x)}
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_list_of_scalars)
    lists = {path_str(path): x for path, x in found if _is_list_of_scalars(x)}
    wrong = [name for name, x in lists.items() if not sizes or len(x) in sizes or isinstance(x[0], list)]
    if wrong:
        raise TypeError(
            f"{what}: {', '.join(wrong[:4])}{' and more' * (len(wrong) > 4)}: a list of Python numbers, each of which "
            "would be a scalar; pass arrays, such as np.asarray(...). A data set of Hugging Face gives arrays as "
            'dataset.with_format("numpy"): js.data.examples(dataset, batch=..., seed=...) makes batches of its rows'
        )


def _is_list_of_scalars(x: Any) -> bool:
    if not isinstance(x, list) or not x:
        return False
    return all(isinstance(one, list) and _is_list_of_scalars(one) for one in x) or not any(
        isinstance(one, list | tuple | dict) or np.ndim(one) for one in x
    )


def _describe_no_rows(batch: PyTree) -> str:
    """Return the error message for a batch in which no array has rows, with a fix if the strategy is the cause."""
    if any(np.ndim(x) for x in jax.tree.leaves(batch)):
        way = "js.without_rows names all of its arrays; name fewer, or use js.shard(axis, roles), which splits no batch"
    else:
        way = "expected a tree of arrays [rows, ...]"
    return f"the batch has no array with rows: {way}"


def describe_differing(counts: dict[str, int]) -> str:
    """Return the error message for a batch whose arrays have different numbers of rows.

    Args:
      counts: {path: number of rows}, from `row_counts`.
    """
    listed = ", ".join(f"{path}: {count}" for path, count in counts.items())
    return f"the arrays of a batch must have the same number of rows (dim 0), got {listed}"


def name_those_without(counts: dict[str, int], rows: int) -> str:
    """Return advice for an error message: to list arrays without rows in `js.without_rows`.

    Args:
      counts: {path: size of dimension 0}, from `row_counts`.
      rows: the number of rows of the batch. The advice names the arrays of another size.
    """
    others = ", ".join([repr(path) for path, size in counts.items() if size != rows][:4])
    return f"name those that have no rows in the strategy, such as js.compose(..., js.without_rows({others}))"


def warn_of_patterns(strategy: Strategy, batch: PyTree) -> None:
    """Warn of patterns in `js.without_rows` that match no array of the batch, for example because they are misspelt."""
    found = paths(batch)
    unused = [p for p in _patterns(strategy) if not any(ends_with(path, p) for path in found)]
    if unused:
        warnings.warn(
            f"without_rows: no array of the batch fits {', '.join(map(repr, unused))}; its arrays are "
            f"{', '.join(found)}",
            stacklevel=5,
        )


def _patterns(strategy: Strategy) -> list[str]:
    return [pattern for part in parts_of(strategy) if isinstance(part, WithoutRows) for pattern in part.patterns]
