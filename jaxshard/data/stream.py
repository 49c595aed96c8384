"""`Batches`: an iterator of batches that are made ahead by one thread, and that knows its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxshard._typing import PyTree


class Batches(Iterator[PyTree]):
    """Global batches on the devices; made by `batches` and `local_batches`.

    `position` is where the next batch stands, in a form that JSON holds; given as `start=` it goes on there. Batches
    that were made ahead and not yet given out don't count. An error of the source is raised by `next` in the place of
    its batch, and ends the batches. `close()`, or the end of a `with` block, stops the thread and drops what was made
    ahead; without it that happens when the iterator is no longer used.
    """

    def __init__(self, read: Callable[[], tuple[PyTree, Any]], position: Any, prefetch: int):
        """`read` makes the next batch and says the position after it; StopIteration is the end."""
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, got {prefetch}")
        self._read: Callable[[], tuple[PyTree, Any]] | None = read
        self._position, self._prefetch = position, prefetch
        # Threads don't inherit JAX's settings, and this one decides dtypes.
        self._x64 = jnp.result_type(float) == jnp.float64
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches") if prefetch else None
        self._ahead: deque[Future[tuple[PyTree, Any]]] = deque()

    @property
    def position(self) -> Any:
        return self._position

    def __next__(self) -> PyTree:
        if self._read is None:
            raise StopIteration
        batch, self._position = self._read() if self._worker is None else self._taken(self._worker, self._read)
        return batch

    def _taken(self, worker: ThreadPoolExecutor, read: Callable[[], tuple[PyTree, Any]]) -> tuple[PyTree, Any]:
        """The next of the batches under way, of which `prefetch` are left."""
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(worker.submit(_with_x64, self._x64, read))
        made = self._ahead[0]
        error = made.exception()  # waits; an interrupt loses no batch
        if error is not None:
            self.close()
            raise error
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Ends the batches; waits for one that is just being made."""
        self._read = None
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_x64(x64: bool, read: Callable[[], tuple[PyTree, Any]]) -> tuple[PyTree, Any]:
    with jax.enable_x64(x64):
        return read()
