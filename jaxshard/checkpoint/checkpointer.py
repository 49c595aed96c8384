"""`Checkpointer`: saves a run while it goes on, every so many steps, and deletes old steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from jaxshard.checkpoint.folder import complete, remove, root_of
from jaxshard.checkpoint.reader import describe, restore
from jaxshard.checkpoint.writer import begin
from jaxshard.core.compat import call_before_exit
from jaxshard.core.layout import Layout
from jaxshard.training.non_finite import is_finite
from jaxshard.training.state import TrainState


class Checkpointer:
    """Saves into dir/<step> in the background, every `every` steps; keeps the newest `keep` steps, all for None.

    A callback of `js.fit`, and a context that waits for the last save:

        with js.Checkpointer("run", layout, every=1000, keep=3) as checkpointer:
            run = js.fit(run, step, batches, steps=10_000, on_run=[checkpointer])
            checkpointer.save(run)

    A save blocks until the arrays are on the host, and before that until the save before it is done. What goes wrong in
    the background is raised by the next call of any method, or shown when the program ends. `data` is called for the
    data's position, as JSON.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        layout: Layout,
        *,
        every: int,
        keep: int | None = None,
        data: Callable[[], Any] | None = None,
    ):
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"Checkpointer: {name} must be at least 1, got {value}")
        self._root, self._layout, self._every, self._keep, self._data = root_of(dir), layout, every, keep, data
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved: int | None = None
        call_before_exit(self._wait_at_exit)

    def __call__(self, step: int, run: TrainState) -> None:
        """Saves the run if its step is one of those to be saved."""
        if step % self._every == 0:
            self.save(run)

    def save(self, run: TrainState) -> None:
        """Saves the run in any case, unless its step is the one that was saved last.

        Raises:
          ValueError, OSError: as `js.save`, of this save or of the one before.
        """
        self.wait_until_finished()
        step = int(run.step)
        if step == self._saved:
            return
        finish = begin(self._root, run, self._layout, self._data() if self._data else None)
        self._pending = self._worker.submit(self._finish, finish, step)

    def restore(self) -> tuple[TrainState, Any]:
        """(the newest saved run whose parameters are finite, the data's position that was saved with it).

        Newer ones are deleted: nobody wants them, and the steps will be saved again. For `js.Rollback`.

        Raises:
          ValueError: there is no such run, or it can't be restored, as `js.restore`.
        """
        self.wait_until_finished()
        newest_first = list(reversed(complete(self._root)))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("steps listed")  # before any of them is deleted
        for step in newest_first:
            run = restore(self._root, self._layout, step=step)
            if is_finite(run.params):
                self._saved = step
                return run, describe(self._root, step=step).data
            if jax.process_index() == 0:
                remove(self._root / str(step))
        raise ValueError(f"{self._root}: no run with finite parameters was saved; save one before the first step")

    def wait_until_finished(self) -> None:
        """Returns once the last save is on disk; raises what went wrong with it."""
        if self._pending is not None:
            wait([self._pending])  # where it is interrupted, the save is still pending
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait_until_finished()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"besides, {failure}")
        finally:
            self._worker.shutdown()

    def _wait_at_exit(self) -> None:
        """Never raises: Python would then not call what else waits for the end, such as another checkpointer."""
        try:
            self.wait_until_finished()
        except Exception as error:
            print(f"jaxshard: {error}", file=sys.stderr, flush=True)

    def _finish(self, finish: Callable[[], Path], step: int) -> None:
        finish()
        self._saved = step
        if self._keep is not None and jax.process_index() == 0:
            steps = complete(self._root)
            for old in [other for other in steps if other != step][: max(0, len(steps) - self._keep)]:
                remove(steps[old])
