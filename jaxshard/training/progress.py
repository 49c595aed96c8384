"""`Progress`: what `js.fit` and `js.parity` tell while they run, to a function of the user or to a view."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxshard.training.goodput import Goodput
from jaxshard.training.records import Record


class Progress(NamedTuple):
    """The state of a training, as `js.fit` passes it to `progress=`; or of a comparison by `js.parity`.

    Attributes:
      phase: "compiling" (the first call of the step), "training", "evaluating" or "finished"; from `js.parity` a
        sentence such as "compiling for one device", with 0 for `step` and `steps`.
      step: the number of the last step; at the start the number that the run had.
      steps: the number of the step after which the training ends.
      record: the record of the last step, with loss, speed and memory; None before the first.
      seconds_left: the seconds until the last step at the pace so far, without the first step and the first evaluation,
        which compile; None if not known.
      goodput: the wall seconds by kind, in the phase "finished"; else None.

    Example:
        def show(progress: js.Progress) -> None:
            print(progress.phase, progress.step, progress.steps, progress.seconds_left)

        run = js.fit(run, step, batches, steps=1000, progress=show)
    """

    phase: str
    step: int
    steps: int
    record: Record | None = None
    seconds_left: float | None = None
    goodput: Goodput | None = None


View = Callable[[Progress], Any]


class Reporter:
    """The part of `js.fit` and `js.parity` that calls a view, if there is one.

    Args:
      view: a function of a `Progress`; None to report nothing.
      step: the number of steps that the run has taken.
      steps: the number of the last step.
    """

    def __init__(self, view: View | None, step: int, steps: int):
        self._view, self._now = view, Progress("training", step, steps)
        self._steps, self._seconds = -1, 0.0  # without the first step, which compiles, and without evaluations
        self._evaluations: list[float] = []  # the seconds of each
        self._began = 0.0

    def phase(self, phase: str, step: int = 0) -> None:
        """Report that another phase begins after a step."""
        self._began = time.perf_counter()
        self._report(self._now._replace(phase=phase, step=step))

    def records(self, records: Sequence[Record]) -> None:
        """Report steps that are done."""
        if self._view is None:
            return
        if self._now.phase == "evaluating":
            self._evaluations.append(time.perf_counter() - self._began)
        for record in records:
            self._steps += 1
            self._seconds += record.seconds if self._steps else 0.0
            left = self._seconds_left(self._now.steps - record.step)
            told = self._now._replace(phase="training", step=record.step, record=record, seconds_left=left)
            self._report(told)

    def finish(self, goodput: Goodput) -> None:
        """Report the end of the training."""
        self._report(self._now._replace(phase="finished", seconds_left=None, goodput=goodput))

    def _seconds_left(self, steps: int) -> float | None:
        """Estimate the seconds of further steps, each like those so far except the first, which compiled.

        An evaluation counts as much as the mean of those after the first, which compiled too.
        """
        if not self._steps:
            return None
        later = self._evaluations[1:]
        evaluations = sum(later) / len(later) * len(self._evaluations) if later else 0.0
        return (self._seconds + evaluations) / self._steps * steps

    def _report(self, now: Progress) -> None:
        self._now = now
        if self._view is not None:
            self._view(now)
