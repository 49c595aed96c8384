"""`Batches`: an iterator of batches with prefetching in a thread, and with a position for resuming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree

Read = Iterator[tuple[PyTree, Any]]
"""An iterator over (batch, position after this batch)."""


class Batches(Iterator[PyTree]):
    """Global batches on the devices; made by `js.batches` and `js.local_batches`.

        with js.batches(source, layout, start=run.step) as batches:
            for batch in batches:
                run, metrics = step(run, batch)

    Each batch is a tree of global `jax.Array`s with the layout's sharding. One thread makes up to `prefetch` batches
    ahead. If the source fails, `next` raises the source's exception at the failing batch, and the iterator ends.

    Attributes:
      once: True if the source can be read only once, so that `seek` raises.
    """

    def __init__(self, open: Callable[[Any], tuple[Read, Any]], position: Any, prefetch: int, *, once: bool = False):
        """Open the batches at a position; users call `js.batches` or `js.local_batches`.

        Args:
          open: `open(position)` returns (an iterator, the position as a JSON value). Each element of the iterator is
            (the next batch, the position after it).
          position: the position of the first batch.
          prefetch: the number of batches to make ahead.
          once: True if the source can be read only once.

        Raises:
          ValueError: a negative `prefetch`.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, got {prefetch}")
        self._open, self.once, self._prefetch = open, once, prefetch
        self._read: Read | None
        # Threads don't inherit JAX's settings, and this one decides dtypes.
        self._x64 = jnp.result_type(float) == jnp.float64
        # Batches that are being made, oldest first. A single worker makes them, so they are in order.
        self._ahead: deque[Future[tuple[PyTree, Any]]] = deque()
        self._open_at(position)

    def _open_at(self, position: Any) -> None:
        self._read, self._position = self._open(position)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches") if self._prefetch else None

    @property
    def position(self) -> Any:
        """Return the position of the next batch, a JSON value to pass to `start=` or `seek` later.

        Batches that were made ahead but not returned yet do not count.
        """
        return self._position

    def seek(self, position: Any) -> None:
        """Go to a saved `position`, or to the batch with this index, as if the iterator had started there.

        Raises:
          TypeError: the source is an iterator that can't save its state, so it can't be read again.
        """
        if self.once:
            raise TypeError(
                "batches: an iterator that has neither get_state and set_state nor state_dict and load_state_dict "
                "can't go to another position; give a source, a list, or an iterable that can be read again"
            )
        self.close()
        self._open_at(position)

    def close(self) -> None:
        """End the iterator, drop batches made ahead, and wait for the batch that is being made.

        Also called at the end of a `with` block.
        """
        self._read = None
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._ahead.clear()

    def __next__(self) -> PyTree:
        if self._read is None:
            raise StopIteration
        batch, self._position = next(self._read) if self._worker is None else self._take(self._worker, self._read)
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, worker: ThreadPoolExecutor, read: Read) -> tuple[PyTree, Any]:
        """Wait for the next batch; return (batch, position after it). The worker makes `prefetch` batches ahead."""
        # Pass `read` to the worker, not `self`, which would keep an unused iterator alive.
        # One more than `prefetch`: the batch to return now.
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(worker.submit(_read_with_x64, self._x64, read))
        oldest = self._ahead[0]
        error = oldest.exception()  # waits; remove the batch only afterwards, so that Ctrl-C loses no batch
        if error is not None:
            self.close()
            raise error
        return self._ahead.popleft().result()


def _read_with_x64(x64: bool, read: Read) -> tuple[PyTree, Any]:
    with jax.enable_x64(x64):
        return next(read)
