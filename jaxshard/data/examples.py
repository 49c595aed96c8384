"""Rows of any indexed data set: lists, arrays, map-style data sets of Grain, torch or Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxshard.core.tree import check_same_tree, path_str
from jaxshard.core.types import PyTree
from jaxshard.data.order import permute
from jaxshard.data.source import places


class Indexed(Protocol):
    """A data set that is read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class Examples:
    """The indexed source that `examples` makes."""

    dataset: Indexed
    batch: int
    seed: int | None

    def rows(self, step: int, rows: np.ndarray) -> PyTree:
        """The examples of the given global rows of the batch of a step, stacked: leaves [len(rows), ...]."""
        epoch, number = np.divmod(places(step, rows, self.batch), len(self.dataset))
        if self.seed is not None:
            number = permute(number, size=len(self.dataset), seed=self.seed, epoch=epoch)
        numbers = number.tolist() or [0]
        stacked = _stacked(numbers, [self.dataset[i] for i in numbers])
        return stacked if number.size else jax.tree.map(lambda leaf: leaf[:0], stacked)


def examples(dataset: Indexed, *, batch: int, seed: int | None) -> Examples:
    """A source of `batch` examples a step from a data set with `len` and an index, each a tree of arrays or numbers.

    The order is drawn from (seed, epoch), every example once in an epoch, as in `windows`. With seed=None it is the
    data set's own, over and over: for one that shuffles by itself, such as a `grain.MapDataset` that ends in
    `.shuffle().repeat()`. Every host reads only its own examples.

    Raises:
      ValueError: an empty data set, a batch below 1; where they are read, examples that are None (what a filtered
        `grain.MapDataset` has in the place of those left out) or differ in structure, shape or dtype.
      TypeError: where they are read, text and other leaves that are no numbers.
    """
    if batch < 1:
        raise ValueError(f"examples: batch must be at least 1, got {batch}")
    if len(dataset) < 1:
        raise ValueError(f"examples: the {type(dataset).__name__} is empty")
    return Examples(dataset, batch, seed)


def _stacked(numbers: list[int], chosen: list[PyTree]) -> PyTree:
    """Leaves [len(chosen), ...] of examples that are all alike."""
    missing = [i for i, example in zip(numbers, chosen, strict=True) if example is None]
    if missing:
        raise ValueError(
            f"examples: number {missing[0]} is None, as in a filtered data set; give js.batches batches of its iterator"
        )
    chosen = [jax.tree.map(np.asarray, example) for example in chosen]
    for number, example in zip(numbers, chosen, strict=True):
        if _kind(example) != _kind(chosen[0]):
            what = f"examples: number {number} differs from number {numbers[0]}"
            check_same_tree(chosen[0], example, what, "pad or crop them to one shape")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *chosen)


def _kind(example: PyTree) -> tuple[Any, ...]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(example)
    words = [f"{path_str(path)} ({leaf.dtype})" for path, leaf in leaves if leaf.dtype.kind in "OSUMm"]
    if words:
        raise TypeError(f"examples: {', '.join(words)} holds no numbers; map the data set to arrays of numbers")
    return (tree, *((leaf.shape, leaf.dtype) for _, leaf in leaves))
