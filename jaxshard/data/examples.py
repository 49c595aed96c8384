"""`examples`: a source of rows from any indexed data set: lists, arrays, map-style data sets of Grain, torch, HF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Int

from jaxshard.core.batch import check_no_lists
from jaxshard.core.foreign_arrays import convert_foreign
from jaxshard.core.tree import check_same_tree, path_str
from jaxshard.core.types import PyTree
from jaxshard.data.source import draw_indices


class Indexed(Protocol):
    """A protocol for indexed data sets: `len(dataset)`, and `dataset[i]` for i from 0 to len(dataset) - 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class Examples:
    """The source that `examples` makes.

    Attributes:
      dataset: the data set with `len` and an index.
      batch: the number of global rows of a step.
      seed: the random seed of the order; None to use the data set's own order.
    """

    dataset: Indexed
    batch: int
    seed: int | None

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> PyTree:
        """Read rows of the global batch of a step; no other examples are read.

        Args:
          step: the index of the batch, from 0.
          rows: row indices from 0 to batch - 1.

        Returns:
          The stacked examples: a tree with leaves [len(rows), ...].

        Raises:
          ValueError, TypeError: see `examples`.
        """
        drawn = draw_indices(step, rows, batch=self.batch, size=len(self.dataset), seed=self.seed)
        numbers = drawn.tolist() or [0]  # without rows, read one example for the shapes
        stacked = _stack(numbers, [self.dataset[i] for i in numbers])
        return stacked if drawn.size else jax.tree.map(lambda leaf: leaf[:0], stacked)


def examples(dataset: Indexed, *, batch: int, seed: int | None) -> Examples:
    """Make a source of batches from a data set with `len` and an index.

    An epoch has every example once, in a new random order that depends on (seed, epoch). Every host reads only the
    examples of its own devices.

        source = js.data.examples(datasets.load_dataset("mnist", split="train").with_format("numpy"), batch=256, seed=0)
        for batch in js.batches(source, layout): ...

    Args:
      dataset: a list, an array, or a map-style data set of Hugging Face, torch or Grain, whose examples are trees of
        arrays or numbers with equal structure, shapes and dtypes.
      batch: the number of global rows of a step.
      seed: the random seed of the order. With None the examples come in the data set's own order in every epoch, for a
        data set that shuffles itself, such as a `grain.MapDataset` that ends in `.shuffle().repeat()`.

    Returns:
      A source of trees with leaves [batch, ...].

    Raises:
      ValueError: an empty data set, or a batch below 1. When examples are read: examples that are None (as for dropped
        examples of a filtered `grain.MapDataset`), or that differ in structure, shape or dtype.
      TypeError: when examples are read: text and other leaves that are not numbers.

    Example:
        dataset = [{"x": np.full(4, number, np.float32), "y": number % 2} for number in range(100)]
        source = js.data.examples(dataset, batch=8, seed=0)
        source.rows(0, np.arange(8))["x"].shape     # (8, 4)
    """
    if batch < 1:
        raise ValueError(f"examples: batch must be at least 1, got {batch}")
    if len(dataset) < 1:
        raise ValueError(f"examples: the {type(dataset).__name__} is empty")
    return Examples(dataset, batch, seed)


def _stack(numbers: list[int], chosen: list[PyTree]) -> PyTree:
    """Stack examples of equal structure and shapes into a tree of arrays [examples, ...].

    `numbers` are the indices of the examples in the data set, for error messages.
    """
    missing = [i for i, example in zip(numbers, chosen, strict=True) if example is None]
    if missing:
        raise ValueError(
            f"examples: number {missing[0]} is None, as in a filtered data set; give js.batches batches of its iterator"
        )
    chosen = [jax.tree.map(np.asarray, convert_foreign("an example", example)) for example in chosen]
    if isinstance(chosen[0], dict):
        check_no_lists("examples", chosen[0])
    # Compare signatures first, which takes a tenth of the time; compare trees only to describe a difference.
    for number, example in zip(numbers, chosen, strict=True):
        if _signature(example) != _signature(chosen[0]):
            what = f"examples: number {number} differs from number {numbers[0]}"
            check_same_tree(chosen[0], example, what, "pad or crop them to one shape")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *chosen)


def _signature(example: PyTree) -> tuple[Any, ...]:
    """Return the structure, shapes and dtypes of an example; raise TypeError for leaves that are not numbers."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(example)
    words = [f"{path_str(path)} ({leaf.dtype})" for path, leaf in leaves if leaf.dtype.kind in "OSUMm"]
    if words:
        raise TypeError(f"examples: {', '.join(words)} holds no numbers; map the data set to arrays of numbers")
    return (tree, *((leaf.shape, leaf.dtype) for _, leaf in leaves))
