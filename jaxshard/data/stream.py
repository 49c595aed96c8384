"""`Batches`: an iterator of batches that are made ahead by one thread, and that knows its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree

Read = Callable[[], tuple[PyTree, Any]]


class Batches(Iterator[PyTree]):
    """Global batches on the devices; made by `batches` and `local_batches`.

    `position` is where the next batch stands, in a form that JSON holds; given as `start=` it goes on there. Batches
    that were made ahead and not yet given out don't count. An error of the source is raised by `next` in the place of
    its batch, and ends the batches. `seek(position)` goes to another position, back or forth, where the source can be
    read again (`once` says that it can't). `close()`, or the end of a `with` block, stops the thread and drops what was
    made ahead; without it that happens when the iterator is no longer used.
    """

    def __init__(self, open: Callable[[Any], tuple[Read, Any]], position: Any, prefetch: int, *, once: bool = False):
        """`open(position)` gives the position and `read`, which makes the next batch and says the position after it.

        StopIteration is the end. With `once` nothing is opened again.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more batches, got {prefetch}")
        self._open, self.once, self._prefetch = open, once, prefetch
        # Threads don't inherit JAX's settings, and this one decides dtypes.
        self._x64 = jnp.result_type(float) == jnp.float64
        self._ahead: deque[Future[tuple[PyTree, Any]]] = deque()
        self._start(position)

    def _start(self, position: Any) -> None:
        opened = self._open(position)
        self._read: Read | None = opened[0]
        self._position = opened[1]
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batches") if self._prefetch else None

    def seek(self, position: Any) -> None:
        """Goes on at a `position`, or at a number of batches, as if started there.

        Raises:
          TypeError: the source is an iterator that saves no state: what it gave is gone.
        """
        if self.once:
            raise TypeError(
                "batches: an iterator that has neither get_state and set_state nor state_dict and load_state_dict "
                "can't go to another position; give a source, a list, or an iterable that can be read again"
            )
        self.close()
        self._start(position)

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
