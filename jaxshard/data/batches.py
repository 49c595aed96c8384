"""Global batches on the devices, from what every host can read whole or from what each host has of its own."""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxshard.core.tree import map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.data.examples import Indexed
from jaxshard.data.source import Source
from jaxshard.data.stream import Batches, Read
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import batch_facts, row_facts

if TYPE_CHECKING:
    from jaxshard.core.layout import Layout

_STATES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""How iterators save their position: Grain's names, torch's and Hugging Face's."""


def batches(
    source: Source | Indexed | Iterable[PyTree], layout: Layout, *, start: Any = 0, prefetch: int = 2
) -> Batches:
    """Global batches from `start` on, each leaf a `jax.Array` placed by the layout. Nothing is communicated.

    The source is one of:

    - a `Source` (`windows`, `examples`, `mixture` or your own), endless: every host reads only the rows that its own
      devices hold, each once. The position is the step;
    - global batches by number: a list, a `grain.MapDataset` that ends in `.batch(n)`, anything with `len` and an index.
      The position is the step; every host reads the whole batch and keeps its rows;
    - an iterable of global batches, the same on every host: a `grain.IterDataset` or `grain.DataLoader`, a generator.
      For the position see `local_batches`.

    Args:
      start: the step to begin with (a `jax.Array` scalar as well: `start=run.step` goes on where a run stopped), or a
        `position`.
      prefetch: how many batches a thread makes and places ahead, so many more on the devices; 0 makes each in `next`.

    Raises:
      TypeError: a source that is none of these. By `next`: what the source raises.
      js.distributed.Disagreement: in several processes, one has other batches: `start`, their shape, or the first row,
        which shows another seed or corpus. (Of an iterable no batch is taken to look at it.)
    """
    if hasattr(source, "rows") and hasattr(source, "batch"):
        _agree(layout, _step(start), lambda step: source.rows(step, np.zeros(1, np.int64)), source.batch)
        return _by_number(_placed_rows(source, layout, _step(start)), start, prefetch)
    if isinstance(source, Mapping | str | bytes):
        raise TypeError(f"batches: a {type(source).__name__} is no source of batches; give an iterable of them")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        indexed: Any = source
        if _step(start) < len(indexed):
            _agree(layout, _step(start), indexed.__getitem__)

        def read(step: int) -> PyTree:
            if step >= len(indexed):
                raise StopIteration
            return _placed_whole(indexed[step], layout)

        return _by_number(read, start, prefetch)
    if not hasattr(source, "__iter__"):
        raise TypeError(
            f"batches: got {type(source).__name__}; give a source with `batch` and `rows(step, rows)`, such as "
            "js.data.windows(...), or global batches: by number, or an iterable of them"
        )
    return _in_turn(source, lambda batch: _placed_whole(batch, layout), start, prefetch)


def local_batches(iterator: Iterable[PyTree], layout: Layout, *, start: Any = 0, prefetch: int = 2) -> Batches:
    """Global batches, `jax.Array` leaves placed by the layout, from an iterator of this host's rows (NumPy arrays).

    All hosts give the same number of rows, in the order of their place in the global batch; hosts that hold the same
    rows (a tensor axis across peers) give the same rows. Nothing is communicated.

    The position is {"batches": how many were given out, "state": ...} for an iterator, or what it is made from, with
    `get_state` and `set_state` (Grain) or `state_dict` and `load_state_dict` (torchdata, Hugging Face), its state in
    base64 where it is bytes; it belongs to this host. Else it is the number of batches.

    Args:
      start: a `position`, or a number of batches, which are read and dropped.
      prefetch: as in `batches`; the iterator then runs in another thread.

    Raises:
      TypeError: a position with a state for an iterator that can't take one. By `next`: what the iterator raises;
        ValueError for leaves without rows.
    """
    return _in_turn(iterator, lambda batch: _placed_local(batch, layout), start, prefetch)


def rows_here(sharding: Any, shape: tuple[int, ...]) -> np.ndarray:
    """int64[...]: the rows of a global array that this process holds, each once, in order."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = {index[0].indices(shape[0])[:2] for index in indices if index is not None}
    return np.unique(np.concatenate([np.arange(*span) for span in spans] or [np.arange(0)]))


def _by_number(placed: Callable[[int], PyTree], start: Any, prefetch: int) -> Batches:
    def open(start: Any) -> tuple[Read, int]:
        steps = itertools.count(_step(start))

        def read() -> tuple[PyTree, int]:
            step = next(steps)
            return placed(step), step + 1

        return read, _step(start)

    return Batches(open, start, prefetch)


def _agree(layout: Layout, step: int, read: Callable[[int], PyTree], rows: int | None = None) -> None:
    """Raises in every process unless all begin with the same batch, of which each reads a row (or all, if not `rows`).

    Does nothing in one process.
    """
    peers = peers_of(layout.mesh)
    if peers is None:
        return
    batch = jax.tree.map(np.asarray, read(step))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows or len(x), *x.shape[1:]), x.dtype), batch)
    row = jax.tree.map(lambda x: x[:1], batch)
    peers.agree("js.batches", {"start": str(step)} | batch_facts(shapes) | row_facts(row))


def _placed_rows(source: Any, layout: Layout, start: int) -> Callable[[int], PyTree]:
    """`fn(step) -> batch`, of which this host reads its own rows."""
    row = source.rows(start, np.zeros(1, np.int64))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((source.batch, *leaf.shape[1:]), leaf.dtype), row)
    shardings = jax.tree.map(layout.batch_sharding, shapes)
    held = [rows_here(s, x.shape) for s, x in zip(jax.tree.leaves(shardings), jax.tree.leaves(shapes), strict=True)]
    rows = np.unique(np.concatenate(held))

    def place(leaf: np.ndarray, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(source.batch)
            return leaf[(slice(*np.searchsorted(rows, [first, last])), *index[1:])]

        return jax.make_array_from_callback(shape.shape, sharding, shard)

    return lambda step: jax.tree.map(place, source.rows(step, rows), shapes, shardings)


def _placed_whole(batch: PyTree, layout: Layout) -> PyTree:
    """A batch that this host has whole."""

    def place(leaf: Any) -> jax.Array:
        leaf = np.array(leaf)  # a copy, as below
        return jax.make_array_from_callback(leaf.shape, layout.batch_sharding(leaf), lambda index: leaf[index])

    return jax.tree.map(place, batch)


def _placed_local(batch: PyTree, layout: Layout) -> PyTree:
    """A batch of which this host has its own rows."""

    def place(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        # A copy: some iterators fill one buffer over and over, and on a CPU JAX goes on using the array it is given.
        leaf = np.array(leaf)
        if leaf.ndim == 0:
            name = path_str(path) or "the batch"
            raise ValueError(f"local_batches: every leaf needs rows in its first dimension, but {name} is a scalar")
        # Hosts may share rows: the share of the global batch that is here follows from the layout, not from the count.
        trial = (leaf.shape[0] * jax.process_count(), *leaf.shape[1:])
        held = len(rows_here(layout.batch_sharding(jax.ShapeDtypeStruct(trial, leaf.dtype)), trial))
        shape = (leaf.shape[0] * trial[0] // held, *leaf.shape[1:])
        sharding = layout.batch_sharding(jax.ShapeDtypeStruct(shape, leaf.dtype))
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return map_with_path(place, batch)


def _in_turn(iterable: Iterable[PyTree], place: Callable[[PyTree], PyTree], start: Any, prefetch: int) -> Batches:
    """The batches of an iterator, which saves its own position where it can."""
    once = isinstance(iterable, Iterator) and _state_names(iterable) is None
    first: Any = None  # where an iterator stood, which knows no other way to its beginning

    def open(start: Any) -> tuple[Read, Any]:
        nonlocal first
        saved = start if isinstance(start, Mapping) else None
        dropped = 0
        if saved is None and first is not None and isinstance(iterable, Iterator):
            saved, dropped = first, _step(start) - first["batches"]
            if dropped < 0:
                raise ValueError(f"batches: {start} lies before batch {first['batches']}, where they were opened")
        names = _state_names(iterable)
        holder: Any = iterable
        if names and saved is not None:
            _set(holder, names, saved)  # before `iter`: torch's loaders begin there
        iterator: Iterator[PyTree] = iter(iterable)
        if names is None:
            holder, names = iterator, _state_names(iterator)
            if names and saved is not None:
                _set(holder, names, saved)
        if names is None and saved is not None:
            raise TypeError(
                f"batches: a position {_short(saved)} for a {type(iterable).__name__}, which has neither get_state and "
                "set_state nor state_dict and load_state_dict; start it at a number of batches"
            )
        number = int(saved["batches"]) + dropped if saved is not None else _step(start)
        for _ in itertools.islice(iterator, dropped if saved is not None else number):
            pass

        def position(number: int) -> Any:
            return number if names is None else {"batches": number, **_state(getattr(holder, names[0])())}

        numbers = itertools.count(number + 1)
        first = position(number) if first is None else first

        def read() -> tuple[PyTree, Any]:
            batch = next(iterator)
            after = position(next(numbers))
            return place(batch), after

        return read, position(number)

    return Batches(open, start, prefetch, once=once)


def _state_names(holder: Any) -> tuple[str, str] | None:
    return next((names for names in _STATES if all(hasattr(holder, name) for name in names)), None)


def _state(state: Any) -> dict[str, Any]:
    """A state under a name that says how it is written; a copy, since some iterators go on changing theirs."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"state": copy.deepcopy(state)}


def _set(holder: Any, names: tuple[str, str], saved: Mapping[str, Any]) -> None:
    if "batches" not in saved or ("state" in saved) == ("base64" in saved):
        raise ValueError(f'batches: {_short(saved)} is no position; expected {{"batches": ..., "state": ...}}')
    state = copy.deepcopy(saved["state"]) if "state" in saved else base64.b64decode(saved["base64"])
    getattr(holder, names[1])(state)


def _step(start: Any) -> int:
    step = int(start)
    if step < 0:
        raise ValueError(f"batches: start must be 0 or more, got {step}")
    return step


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
