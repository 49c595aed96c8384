"""What `fit` does about bad steps: raises, goes on, or goes back and takes steps again without a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxshard.core.types import PyTree
from jaxshard.training.non_finite import GO_ON, IN_A_ROW, BadStep, BadSteps, Rollback, explain, is_finite
from jaxshard.training.records import Metrics, Reader, Record, tell
from jaxshard.training.state import TrainState


class Feed(Iterator[tuple[int, PyTree]]):
    """(number of the step, its batch) up to the last step; can go back, and knows which batches are left out."""

    def __init__(self, batches: Iterable[PyTree], step: int, steps: int):
        self._batches, self._iterator, self._step, self._steps = batches, iter(batches), step, steps
        self.left_out: set[int] = set()

    def __next__(self) -> tuple[int, PyTree]:
        if self._step >= self._steps:
            raise StopIteration  # and no batch is drawn in vain
        batch = next(self._iterator)
        self._step += 1
        return self._step, batch

    def check_can_go_back(self) -> None:
        seek = getattr(self._batches, "seek", None)
        if seek is None or getattr(self._batches, "once", False):
            kind = "batches of an iterator without a state" if seek else type(self._batches).__name__
            raise TypeError(
                f"fit: bad_steps=js.Rollback(...) needs batches that can go back, got {kind}; make them with "
                "js.batches(source, layout) of a source, a list, or an iterable that saves its position"
            )

    def go_back(self, step: int, position: Any) -> None:
        """The next batch is that after `step`."""
        known = isinstance(position, int) or (isinstance(position, Mapping) and "batches" in position)
        self._batches.seek(position if known else step)  # type: ignore[attr-defined]  # checked above
        self._iterator, self._step = iter(self._batches), step


class Guard:
    """What happens after bad steps."""

    def __init__(self, policy: BadSteps, feed: Feed, reader: Reader):
        if policy not in ("raise", "skip") and not isinstance(policy, Rollback):
            raise ValueError(f"fit: bad_steps must be 'raise', 'skip' or js.Rollback(restore), got {policy!r}")
        self._policy, self._feed, self._reader = policy, feed, reader
        self._row = 0
        self._returns: Counter[int] = Counter()
        if isinstance(policy, Rollback):
            feed.check_can_go_back()

    def left_out(self, run: TrainState) -> tuple[TrainState, Metrics]:
        """The run after a batch that is left out."""
        return run._replace(step=run.step + 1), {"loss": math.nan, "grad_norm": math.nan, "bad": 1.0}

    def after(
        self, run: TrainState, records: list[Record], callbacks: Sequence[Callable[[Record], Any]], *, ends: bool
    ) -> TrainState | None:
        """The run to go on with instead, if a step among the records was bad and the policy is to go back.

        Where the training `ends` there is nothing to go back for: the run is as if the batch had been skipped.
        """
        for number, record in enumerate(records):
            bad = self._reader.bad.pop(record.step, None)
            self._row = self._row + 1 if bad else 0
            skips = self._policy == "skip" and self._row < IN_A_ROW
            if bad is None or skips or (ends and isinstance(self._policy, Rollback)):
                continue
            tell(callbacks, records[: number + 1])
            why = explain(bad, record.metrics["loss"], record.step)
            if self._policy == "raise":
                raise BadStep(why, GO_ON, record.step, run)
            if self._policy == "skip":
                why += f", and so were all of the {IN_A_ROW} last steps: skipping does not help"
                raise BadStep(why, step=record.step, run=run)
            return self._go_back(run, record.step, why)
        return None

    def _go_back(self, run: TrainState, step: int, why: str) -> TrainState:
        assert isinstance(self._policy, Rollback)
        spoiled = not is_finite(run.params)
        saved, position = self._policy.restore()
        back = int(saved.step)
        self._returns[back] += 1
        if self._returns[back] > self._policy.limit:
            raise BadStep(
                f"{why}, after {self._policy.limit} returns to step {back}: leaving batches out does not help; lower "
                "the learning rate, or start from an earlier saved run",
                step=step,
                run=run,
            )
        self._feed.left_out.add(step - 1 if spoiled and step - 1 > back else step)
        self._feed.go_back(back, position)
        self._reader.forget()
        return saved
