"""`Batches`: an iterator of batches that one thread makes ahead, and that knows its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree

Read = Iterator[tuple[PyTree, Any]]
"""An iterator that makes (the next batch, the position after it)."""


class Batches(Iterator[PyTree]):
    """Global batches on the devices; made by `js.batches` and `js.local_batches`.

        with js.batches(source, layout, start=run.step) as batches:
            for batch in batches:
                run, metrics = step(run, batch)

    Each batch is a tree of global `jax.Array`s, placed by the layout. One thread makes them, up to `prefetch` ahead. An
    error of the source is raised by `next` in the place of its batch, and ends the batches.

    Attributes:
      once: True if the source can't be read again, so that `seek` is refused.
    """

    def __init__(self, open: Callable[[Any], tuple[Read, Any]], position: Any, prefetch: int, *, once: bool = False):
        """Open the batches at a position; users call `js.batches` or `js.local_batches`.

        Args:
          open: `open(position)` returns (read, position): `next(read)` makes the next batch and returns it with the
            position after it.
          position: where to begin.
          prefetch: the number of batches to make ahead.
          once: the source can't be opened a second time.

        Raises:
          ValueError: a negative `prefetch`.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, got {prefetch}")
        self._open, self.once, self._prefetch = open, once, prefetch
        self._read: Read | None
        # Threads don't inherit JAX's settings, and this one decides dtypes.
        self._x64 = jnp.result_type(float) == jnp.float64
        # Batches under way, oldest first. A single worker makes them, so they come in order.
        self._ahead: deque[Future[tuple[PyTree, Any]]] = deque()
        self._open_at(position)

    def _open_at(self, position: Any) -> None:
        self._read, self._position = self._open(position)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches") if self._prefetch else None

    @property
    def position(self) -> Any:
        """The position of the next batch, in a form that JSON holds; `start=` and `seek` take it.

        Batches that were made ahead and not yet given out don't count.
        """
        return self._position

    def seek(self, position: Any) -> None:
        """Go to a `position` or to a number of batches, back or forth, as if it had started there.

        Raises:
          TypeError: the source is an iterator that saves no state: what it gave is gone.
        """
        if self.once:
            raise TypeError(
                "batches: an iterator that has neither get_state and set_state nor state_dict and load_state_dict "
                "can't go to another position; give a source, a list, or an iterable that can be read again"
            )
        self.close()
        self._open_at(position)

    def close(self) -> None:
        """End the batches, drop those made ahead, and wait for one that is just being made.

        The end of a `with` block does it, and so does the end of the iterator's life.
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
        """Take the oldest of the batches under way, after which `prefetch` are left."""
        # The worker gets `read`, never `self`: it would keep an iterator alive that nobody uses any more.
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(worker.submit(_read_with_x64, self._x64, read))
        oldest = self._ahead[0]
        error = oldest.exception()  # waits; the batch is taken off only afterwards, so that Ctrl-C loses none
        if error is not None:
            self.close()
            raise error
        return self._ahead.popleft().result()


def _read_with_x64(x64: bool, read: Read) -> tuple[PyTree, Any]:
    with jax.enable_x64(x64):
        return next(read)
