"""`batches` and `local_batches`: make global batches on the devices from host data, without communication.

There are three kinds of input. With two hosts and a global batch of 8 rows, split over the hosts' devices:

    a source          host 0 reads rows 0-3, host 1 reads rows 4-7               `batches(source, ...)`
    global batches    each host reads rows 0-7 and keeps the four of its devices `batches([batch, ...], ...)`
    local batches     each host's iterator yields four rows: those of host 0     `local_batches(iterator, ...)`
                      become the global rows 0-3, those of host 1 rows 4-7
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.core.batch import check_no_lists, describe_differing, name_those_without, row_counts
from jaxshard.core.foreign_arrays import as_arrays, convert_foreign
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.tree import map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.data.examples import Indexed
from jaxshard.data.resumable import batches_in_turn, to_step
from jaxshard.data.source import Source
from jaxshard.data.stream import Batches, Read
from jaxshard.distributed.agree import Peers, peers_of
from jaxshard.distributed.facts import batch_facts, row_facts

if TYPE_CHECKING:
    from jaxshard.core.layout import Layout


def batches(
    source: Source | Indexed | Iterable[PyTree], layout: Layout, *, start: Any = 0, prefetch: int = 2
) -> Batches:
    """Make an iterator of global batches, whose leaves are `jax.Array`s with the layout's sharding. No collectives.

        source = js.data.windows(tokens, batch=32, seq=1024, seed=0)
        for batch in js.batches(source, layout, start=run.step):     # {"tokens": global int32[32, 1025]}
            run, metrics = step(run, batch)

    Args:
      source: one of

        - a `js.data.Source` (`windows`, `examples`, `mixture` or your own), endless: every host reads only the rows
          that its own devices store, and each row once. `Batches.position` is the step.
        - indexed global batches: a list, a `grain.MapDataset` that ends in `.batch(n)`, anything with `len` and an
          index. `Batches.position` is the step; every host reads the full batch and keeps the rows of its devices.
        - an iterable of global batches, the same on every host: a `grain.IterDataset` or `grain.DataLoader`, a
          `DataLoader` of torch, `dataset.with_format("numpy").iter(batch_size)` of Hugging Face, a generator.
          `Batches.position` is as for `local_batches`.

        Leaves are arrays of NumPy or JAX, or of a library with `__array__` or `__dlpack__`, such as torch.

      layout: its strategy determines the sharding of a batch.
      start: the first step (also as a `jax.Array` scalar: `start=run.step` continues a training that stopped), or a
        `Batches.position` that was saved.
      prefetch: the number of batches that a thread makes ahead and keeps on the devices; with 0 each batch is made when
        `next` is called.

    Returns:
      An iterator of trees of global arrays [batch, ...], with a `position`, `seek` and `close`.

    Raises:
      TypeError: a source of another kind, a data set of single rows (use `js.data.examples`), or a list of Python
        numbers instead of an array. Errors of the source are raised by `next`.
      js.distributed.Disagreement: the processes differ in `start`, or in the shape or first row of the first batch,
        because their seeds or corpora differ. (For an iterable the rows are not compared.)

    Example:
        source = js.data.windows(tokens, batch=8, seq=16, seed=0)
        with js.batches(source, layout, start=run.step) as batches:
            run = js.fit(run, step, batches, steps=1000)
    """
    if hasattr(source, "rows") and hasattr(source, "batch"):
        return _batches_by_number(_rows_reader(source, layout, to_step(start)), start, prefetch)
    if isinstance(source, Mapping | str | bytes):
        raise TypeError(f"batches: a {type(source).__name__} is no source of batches; give an iterable of them")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        _check_gives_batches(source)
        return _batches_by_number(_whole_reader(source, layout, to_step(start)), start, prefetch)
    if not hasattr(source, "__iter__"):
        raise TypeError(
            f"batches: got {type(source).__name__}; give a source with `batch` and `rows(step, rows)`, such as "
            "js.data.windows(...), or global batches: by number, or an iterable of them"
        )
    return batches_in_turn(source, lambda batch: _place_whole(batch, layout), start, prefetch)


def local_batches(iterator: Iterable[PyTree], layout: Layout, *, start: Any = 0, prefetch: int = 2) -> Batches:
    """Make global batches from an iterator of this host's rows. No collectives.

    All hosts must provide the same number of rows, in the order of the global batch. If the devices of several hosts
    store the same rows of the global batch (such as with a tensor axis over hosts), these hosts must provide equal
    rows.

        loader = grain.DataLoader(...)                               # {"x": [8, 3]} on each of 4 hosts
        for batch in js.local_batches(loader, layout): ...           # {"x": global [32, 3]}

    `Batches.position` is {"batches": number of returned batches, "state": ...} if the iterator has `get_state` and
    `set_state` (Grain) or `state_dict` and `load_state_dict` (torchdata, Hugging Face). A state of bytes is stored
    under "base64" in place of "state". This position is valid for this host only. For any other iterator,
    `Batches.position` is the number of returned batches.

    Args:
      iterator: yields trees of arrays [rows of this host, ...], of NumPy, JAX, torch or the like.
      layout: its strategy determines the sharding of a batch.
      start: a `Batches.position` that was saved, or a number of batches to read and drop.
      prefetch: see `batches`; the iterator then runs in another thread.

    Returns:
      An iterator of trees of global arrays [rows of all hosts, ...], with a `position`, `seek` and `close`.

    Raises:
      TypeError: a position with a state, for an iterator that can't restore one.
      ValueError: raised by `next`: a scalar, or arrays with different numbers of rows. Errors of the iterator are also
        raised by `next`.

    Example:
        with js.local_batches(rows_of_this_host, layout) as batches:    # an iterator of {"tokens": int32[rows, 129]}
            run = js.fit(run, step, batches, steps=100)
    """
    return batches_in_turn(iterator, lambda batch: _place_local(batch, layout), start, prefetch)


def local_rows(sharding: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the indices of the rows (dimension 0) of a global array that this process's devices store.

    Args:
      sharding: the sharding of the array.
      shape: the global shape of the array.

    Returns:
      int64 indices, sorted, each once.
    """
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = {index[0].indices(shape[0])[:2] for index in indices if index is not None}
    return np.unique(np.concatenate([np.arange(*span) for span in spans] or [np.arange(0)]))


def _batches_by_number(read_step: Callable[[int], PyTree], start: Any, prefetch: int) -> Batches:
    """Make `Batches` whose position is the step; `read_step(step)` returns the batch of a step."""

    def open(start: Any) -> tuple[Read, int]:
        first = to_step(start)
        return zip(map(read_step, itertools.count(first)), itertools.count(first + 1)), first

    return Batches(open, start, prefetch)


def _rows_reader(source: Any, layout: Layout, start: int) -> Callable[[int], PyTree]:
    """Return a function `read(step) -> batch` for a `Source`; a host reads only the rows that its devices store."""
    row = jax.tree.map(np.asarray, convert_foreign("the batch", source.rows(start, np.zeros(1, np.int64))))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((source.batch, *leaf.shape[1:]), leaf.dtype), row)
    if (peers := peers_of(layout.mesh)) is not None:
        _agree_on_start(peers, start, shapes, row)
    shardings = jax.tree.map(layout.batch_sharding, shapes)
    held = [local_rows(s, x.shape) for s, x in zip(jax.tree.leaves(shardings), jax.tree.leaves(shapes), strict=True)]
    rows = np.unique(np.concatenate(held))  # leaves may be split differently, so read the rows that any leaf needs

    def place(leaf: np.ndarray, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(source.batch)
            begin, end = np.searchsorted(rows, [first, last])  # global row indices -> indices in `leaf`
            return leaf[(slice(begin, end), *index[1:])]

        return jax.make_array_from_callback(shape.shape, sharding, shard)

    def read(step: int) -> PyTree:
        batch = convert_foreign("the batch", source.rows(step, rows))
        check_narrowing(batch, "the batch")
        return jax.tree.map(place, batch, shapes, shardings)

    return read


def _check_gives_batches(indexed: Any) -> None:
    """Raise TypeError if indexing a data set of torch or Hugging Face returns a single row, not a batch.

    An element is a single row if any leaf is a scalar, or if no leaf has two dimensions.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(indexed).__mro__}
    if not libraries & {"torch", "datasets"} or not len(indexed):
        return
    sizes = [np.ndim(x) for x in jax.tree.leaves(as_arrays("a batch", indexed[0]))]
    if 0 in sizes or max(sizes, default=0) < 2:
        raise TypeError(
            f"batches: the elements of this {type(indexed).__name__} are single rows; make batches of them with "
            "js.data.examples(dataset, batch=..., seed=...), or give torch's DataLoader(dataset, batch_size=...)"
        )


def _whole_reader(indexed: Any, layout: Layout, start: int) -> Callable[[int], PyTree]:
    """Return a function `read(step) -> batch` for a list of global batches; it raises StopIteration after the last."""
    if (peers := peers_of(layout.mesh)) is not None and start < len(indexed):
        batch = jax.tree.map(np.asarray, as_arrays("a batch", indexed[start]))
        _agree_on_start(peers, start, batch, jax.tree.map(lambda x: np.atleast_1d(x)[:1], batch))

    def read(step: int) -> PyTree:
        if step >= len(indexed):
            raise StopIteration
        return _place_whole(indexed[step], layout)

    return read


def _agree_on_start(peers: Peers, step: int, batch: PyTree, row: PyTree) -> None:
    """Raise Disagreement in every process unless all begin with the same step, batch shape and first row."""
    peers.agree("js.batches", {"start": str(step)} | batch_facts(batch) | row_facts(row))


def _place_whole(batch: PyTree, layout: Layout) -> PyTree:
    """Copy a global batch to the devices of this host, which has all rows; each device gets only its own rows."""

    batch = as_arrays("a batch", batch)
    check_no_lists("a batch", batch)
    # Copy: some iterators reuse one buffer, and on CPUs a jax.Array may share the memory of the NumPy array.
    batch = jax.tree.map(np.array, batch)

    def place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    check_narrowing(batch, "the batch")
    return jax.tree.map(place, batch, layout.batch_shardings(batch))


def _place_local(batch: PyTree, layout: Layout) -> PyTree:
    """Copy the rows of this host to its devices, as a part of a global batch whose other rows are on other hosts."""

    batch = as_arrays("a batch", batch)
    check_no_lists("a batch", batch)
    counts = row_counts(layout.strategy, batch)
    if len(set(counts.values())) > 1:
        fix = name_those_without(counts, Counter(counts.values()).most_common(1)[0][0])
        raise ValueError(f"local_batches: {describe_differing(counts)}; {fix}")

    def place(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        array = np.array(leaf)  # a copy, as in `_place_whole`
        if array.ndim and path_str(path) not in counts:  # an array without rows is replicated
            return jax.make_array_from_callback(
                array.shape, NamedSharding(layout.mesh, PartitionSpec()), lambda index: array[index]
            )
        if array.ndim == 0:
            name = path_str(path) or "the batch"
            raise ValueError(f"local_batches: every leaf needs rows in its first dimension, but {name} is a scalar")
        # Hosts may have the same rows, so the global number of rows is not simply local rows times hosts. The fraction
        # of rows on this host follows from the layout: compute it for a trial shape that is surely divisible.
        trial = (len(array) * jax.process_count(), *array.shape[1:])
        held = len(local_rows(layout.batch_sharding(jax.ShapeDtypeStruct(trial, array.dtype)), trial))
        shape = (len(array) * trial[0] // held, *array.shape[1:])
        sharding = layout.batch_sharding(jax.ShapeDtypeStruct(shape, array.dtype))
        placed: jax.Array = jax.make_array_from_process_local_data(sharding, array, shape)
        return placed

    check_narrowing(batch, "the batch")
    return map_with_path(place, batch)
