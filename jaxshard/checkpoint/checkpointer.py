"""`js.Checkpointer`: save a run every few steps during training, and delete old steps."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, Self

import jax

from jaxshard.checkpoint.folder import absolute_root, complete_steps, delete_step, step_folders
from jaxshard.checkpoint.os_errors import os_error
from jaxshard.checkpoint.ownership import check_owned, delete_objects, hold, release
from jaxshard.checkpoint.reader import describe, restore
from jaxshard.checkpoint.writer import begin_save, delete_interrupted
from jaxshard.core.compat import call_before_exit
from jaxshard.core.counts import check_count
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.text_table import first_words
from jaxshard.core.types import PyTree
from jaxshard.distributed.agree import all_peers
from jaxshard.distributed.together import call_in_first_process
from jaxshard.storage.paths import AnyPath, ObjectPath
from jaxshard.training.goodput_file import LEDGER
from jaxshard.training.metrics import finite
from jaxshard.training.non_finite import is_finite
from jaxshard.training.state import TrainState

_WAIT = 5.0
"""Seconds between two looks at the lease while a save is awaited."""


class Checkpointer:
    """A callback that saves a run into dir/<step> in the background, every `every` steps and at the end.

    Pass it to `js.fit`, inside a `with` block that waits at its end for the last save:

        with js.Checkpointer("run", layout, every=1000, keep=3) as checkpointer:
            run = js.fit(run, step, batches, steps=10_000, on_run=[checkpointer])

    When training is finished or stopped early, `js.fit` saves the last run too; not after an error. In a loop of your
    own call `checkpointer.save(run)` for that.

    A save blocks the caller until the previous save is done and the arrays are on the host; files are written in a
    thread. Errors of the thread are raised by the next call of any method, or printed when the program ends. With
    several processes, each has a `Checkpointer` and calls the same methods in the same order.

    A `Checkpointer` locks the folder until the end of the `with` block (or of the process), so that no second training
    can save into it: creating a `Checkpointer` for the same folder in another program raises `BlockingIOError`. In an
    object store the lock is a lease, which a thread renews. If it can't be renewed, the next call raises an error with
    the exit status 75, and nothing more is saved.

    Args:
      dir: the folder of checkpoints, on a disk that all processes see, or in an object store: s3://bucket/run or
        gs://bucket/run.
      layout: the layout of the runs to save.
      every: save after each step whose number is divisible by this.
      keep: keep this many of the newest steps and delete older steps; None keeps all. Steps whose folders are symbolic
        links are not counted and never deleted; a warning names them.
      data: a function `data()`, called at each save, that returns the position of the data, as in `js.save`.
      best: a metric of the evaluation, such as "loss". The run with the best value is also saved, in dir/best. Load it
        by `js.restore("run/best", layout)`; its position of the data is {"evaluation": ..., "position": ...}.
      best_mode: "min" if a lower value is better, "max" if a higher value is.
      init_from: for a model of `js.lora`, the base weights for the method `restore`, as in `js.restore`.

    Raises:
      ValueError: `every` or `keep` is less than 1, or `best_mode` is neither "min" nor "max".
      BlockingIOError: another process trains into this folder; the message names the process.
      OSError: the folder can't be written (no permission, a read-only disk), with the errno of the cause.

    Attributes:
      best: the metric whose best run is kept, or None. With a metric `js.fit` requires `evaluate=`.
      ledger: the file in the folder in which `js.fit` counts the wall time of the training; see `js.Goodput`.

    Example:
        with js.Checkpointer("run", layout, every=100, keep=3) as checkpointer:
            run = js.fit(run, step, batches, steps=1000, on_run=[checkpointer])
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        layout: Layout,
        *,
        every: int,
        keep: int | None = None,
        data: Callable[[], Any] | None = None,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        init_from: PyTree = None,
    ):
        check_layout("js.Checkpointer(dir, layout, every=...)", layout)
        check_count("Checkpointer", every=every, keep=keep)
        if best_mode not in ("min", "max"):
            raise ValueError(f'Checkpointer: best_mode must be "min" or "max", got {best_mode!r}')
        self._root, self._layout, self._every, self._keep, self._data = absolute_root(dir), layout, every, keep, data
        self.ledger = self._root / LEDGER
        self._init_from, self._is_first = init_from, jax.process_index() == 0
        links = [path.name for path in step_folders(self._root).values() if path.is_symlink()]
        if links and keep is not None and jax.process_index() == 0:
            warnings.warn(
                f"{self._root}: these steps are symbolic links, which keep={keep} neither counts nor deletes: "
                f"{first_words(links)}",
                stacklevel=2,
            )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved: int | None = None
        self._is_locked = call_in_first_process(self._lock, "js.Checkpointer")
        self.best = best
        self._best = None if best is None else _Best(self._root / "best", layout, best, best_mode, data)
        call_before_exit(self._wait_at_exit)

    def __call__(self, step: int, run: TrainState) -> None:
        """Save the run if `every` divides `step`, the number of the step that was just taken."""
        if step % self._every == 0:
            self.save(run)
        else:
            check_owned(self._root, ask=False)

    def evaluated(self, step: int, run: TrainState, evaluation: Mapping[str, float]) -> None:
        """Save the run if it is the best so far; `js.fit` calls this with the result of every evaluation.

        Args:
          step: the number of the step that was just taken.
          run: the run after this step.
          evaluation: {name of a metric: value}.

        Raises:
          ValueError: `evaluation` lacks the metric `best`; also for the reasons of `save`.
        """
        if self._best is not None:
            self._best.evaluated(step, run, evaluation)

    def resumed(self, step: int, run: TrainState, evaluation: Mapping[str, float]) -> None:
        """Save the run that training goes on from if it is the best so far and dir/best lacks it, as after a kill.

        Args:
          step: the number of steps that the run has taken.
          run: the run.
          evaluation: its evaluation, {name of a metric: value}.

        Raises:
          ValueError: as `evaluated`.
        """
        if self._best is not None:
            self._best.resumed(step, run, evaluation)

    def ended(self, run: TrainState) -> None:
        """Save the last run; `js.fit` calls this when training ends without an error.

        Raises:
          ValueError, OSError: as `save`.
        """
        self.save(run)

    def save(self, run: TrainState) -> None:
        """Save the run in the background, unless the last save was of the same step.

        Raises:
          ValueError, OSError: as `js.save`, for this save or the previous one.
        """
        self.wait_until_finished()
        step = int(run.step)
        if step == self._saved:
            return
        finish = begin_save(self._root, run, self._layout, self._data() if self._data else None)
        self._pending = self._worker.submit(self._finish_save, finish, step)

    def restore(self) -> tuple[TrainState, Any]:
        """Restore the newest saved run whose parameters are finite, for `js.Rollback`.

        Newer saved steps, whose parameters are not finite, are deleted; training will save these steps again.

        Returns:
          (the run, the data's position that was saved with it).

        Raises:
          ValueError: there is no such run, or it can't be restored, as `js.restore`.
        """
        self.wait_until_finished()
        newest_first = list(reversed(complete_steps(self._root)))
        if (peers := all_peers()) is not None:
            peers.meet("js.Checkpointer.restore")  # before any of them is deleted
        for step in newest_first:
            run = restore(self._root, self._layout, step=step, init_from=self._init_from)
            if is_finite(run.params):
                self._saved = step
                return run, describe(self._root, step=step).data
            folder = self._root / str(step)
            if jax.process_index() == 0 and not folder.is_symlink():
                _delete(folder)
        raise ValueError(f"{self._root}: no run with finite parameters was saved; save one before the first step")

    def wait_until_finished(self) -> None:
        """Block until the last save is on disk; raise the error of the save if it failed."""
        if self._pending is not None:
            while not wait([self._pending], timeout=_WAIT).done:  # if Ctrl-C interrupts this, the save is still pending
                check_owned(self._root, ask=False)  # a store that does not answer must not keep a lost training
            pending, self._pending = self._pending, None
            pending.result()
        if self._best is not None:
            self._best.saver.wait_until_finished()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait_until_finished()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(f"besides, {failure}")
        finally:
            self._worker.shutdown(wait=self._pending is None)
            self._unlock()
            if self._best is not None:
                self._best.saver.__exit__(kind, error, trace)

    def _wait_at_exit(self) -> None:
        """Wait for the last save when the program ends, and print the error if the save failed.

        The error is not raised, because Python would then skip other functions that are registered to run at exit.
        """
        try:
            self.wait_until_finished()
        except Exception as error:
            print(f"jaxshard: {error}", file=sys.stderr, flush=True)
        self._unlock()

    def _lock(self) -> bool:
        """Create and lock the folder, and delete what interrupted saves left in it; the result is always True.

        Raises:
          OSError: the folder can't be written; the message names it.
        """
        try:
            hold(self._root)
            delete_interrupted(self._root)
        except BlockingIOError:
            raise
        except OSError as error:
            if isinstance(self._root, ObjectPath):
                raise  # it names the address, the reason and what to check
            where = error.filename or self._root
            problem = f"{where}: checkpoints can't be saved here: {error.strerror}; give a folder that can be written"
            raise os_error(problem, error) from None
        return True

    def _unlock(self) -> None:
        if self._is_locked and self._is_first:
            release(self._root)
        self._is_locked = False

    def _finish_save(self, finish: Callable[[], AnyPath], step: int) -> None:
        finish()
        self._saved = step
        if self._keep is not None and jax.process_index() == 0:
            steps = {number: path for number, path in complete_steps(self._root).items() if not path.is_symlink()}
            for old in [other for other in steps if other != step][: max(0, len(steps) - self._keep)]:
                _delete(steps[old])


def _delete(folder: AnyPath) -> None:
    """Delete a complete step."""
    delete_objects(folder) if isinstance(folder, ObjectPath) else delete_step(folder)


class _Best:
    """A saver of the run with the best evaluation so far, into a folder of its own.

    At the start it reads the evaluation of the run in this folder, which an earlier process may have saved. A later run
    replaces the saved run if its evaluation is better. It also replaces the saved run if its step is not larger, which
    means that this training started again from an earlier step.
    """

    def __init__(self, root: AnyPath, layout: Layout, metric: str, mode: str, data: Callable[[], Any] | None):
        self._metric, self._sign, self._data = metric, 1 if mode == "min" else -1, data
        self._step, self._evaluation = -1, dict[str, float | None]()
        if steps := complete_steps(root):
            self._step = max(steps)
            self._evaluation = dict(describe(root, step=self._step).data["evaluation"])
        self.saver = Checkpointer(root, layout, every=1, keep=1, data=self._describe)

    def resumed(self, step: int, run: TrainState, evaluation: Mapping[str, float]) -> None:
        if self._step < step:  # a later one stays until the training, which began again, has an evaluation
            self.evaluated(step, run, evaluation)

    def evaluated(self, step: int, run: TrainState, evaluation: Mapping[str, float]) -> None:
        if self._metric not in evaluation:
            raise ValueError(
                f"Checkpointer: best={self._metric!r} is no metric of the evaluation: {sorted(evaluation)}"
            )
        value, before = float(evaluation[self._metric]), self._evaluation.get(self._metric)
        if not math.isfinite(value):
            return
        if before is not None and self._step < step and self._sign * value >= self._sign * before:
            return
        self._step, self._evaluation = step, {name: finite(float(x)) for name, x in evaluation.items()}
        self.saver.save(run)

    def _describe(self) -> dict[str, Any]:
        return {"evaluation": self._evaluation, "position": self._data() if self._data else None}
