"""Recover from bad steps in `fit`: raise, skip the batch, or roll back and repeat steps without it.

Metrics are read late (`records.py`), so later steps may have run before a bad step is known. That does no harm: a step
with a bad loss or gradient changes only the step count, so the run is always valid. If the update made parameters
infinite or NaN, all later steps are bad too and change nothing, and training can't go on from that run. A rollback from
bad step 7 to a run saved after step 4:

    step      1  2  3  4  5  6  7 | back to 4 |  5  6  7       8  9
    batch     1  2  3  4  5  6  7             |  5  6  (none)  8  9

Batches keep their numbers: a skipped batch still counts as a step, so that later steps keep their batches and random
keys, and all processes agree without communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxshard.core.types import PyTree
from jaxshard.optim.local import LocalState
from jaxshard.training.non_finite import IN_A_ROW, Bad, BadStep, BadSteps, Rollback, advise, describe_bad
from jaxshard.training.records import Metrics, Reader, Record, call_with_records
from jaxshard.training.state import TrainState


class Feed(Iterator[tuple[int, PyTree]]):
    """An iterator over (step number, batch) up to step `steps`, which `go_back` sets back to an earlier step.

    Attributes:
      left_out: the numbers of the steps whose batches `fit` skips; filled by `Recovery`.
    """

    def __init__(self, batches: Iterable[PyTree], step: int, steps: int):
        self._batches, self._iterator, self._step, self._steps = batches, iter(batches), step, steps
        self.left_out: set[int] = set()

    def __next__(self) -> tuple[int, PyTree]:
        if self._step >= self._steps:
            raise StopIteration  # before drawing a batch that would not be used
        batch = next(self._iterator)
        self._step += 1
        return self._step, batch

    def check_can_go_back(self) -> None:
        """Raise TypeError unless the batches have a method `seek` that can return to an earlier position."""
        seek = getattr(self._batches, "seek", None)
        if seek is None or getattr(self._batches, "once", False):
            kind = "batches of an iterator without a state" if seek else type(self._batches).__name__
            raise TypeError(
                f"fit: bad_steps=js.Rollback(...) needs batches that can go back, got {kind}; make them with "
                "js.batches(source, layout) of a source, a list, or an iterable that saves its position"
            )

    def go_back(self, step: int, position: Any) -> None:
        """Go back to the batch at `position`, if this is a saved state of batches, else to the batch after `step`."""
        known = isinstance(position, int) or (isinstance(position, Mapping) and "batches" in position)
        self._batches.seek(position if known else step)  # type: ignore[attr-defined]  # check_can_go_back saw to it
        self._iterator, self._step = iter(self._batches), step


class Recovery:
    """The policy of one call of `fit` for bad steps, which counts bad steps and returns to saved runs."""

    def __init__(self, policy: BadSteps, feed: Feed, reader: Reader, run: TrainState):
        if policy not in ("raise", "skip") and not isinstance(policy, Rollback):
            raise ValueError(f"fit: bad_steps must be 'raise', 'skip' or js.Rollback(restore), got {policy!r}")
        self._policy, self._feed, self._reader = policy, feed, reader
        self._bad_in_a_row, self._worked = 0, False
        self._returns: Counter[int] = Counter()
        if isinstance(policy, Rollback):
            _check_takes_every_step(run)
            feed.check_can_go_back()

    def leave_out(self, run: TrainState) -> tuple[TrainState, Metrics]:
        """Skip a batch: return the run with its step count raised by 1, and metrics that are NaN."""
        return run._replace(step=run.step + 1), dict.fromkeys(("loss", "grad_norm", "update_norm"), math.nan) | {
            "bad": 1.0
        }

    def recover(
        self, run: TrainState, records: list[Record], callbacks: Sequence[Callable[[Record], Any]], *, ends: bool
    ) -> TrainState | None:
        """Apply the policy to the first bad step among the records: go on, go back to a saved run, or raise.

        Args:
          run: the run after the latest step.
          records: the records of the steps that were just read.
          callbacks: functions that receive the records up to the bad step, before this method goes back or raises.
          ends: True if training ends here. Then a rollback does not go back: the bad step is only skipped.

        Returns:
          The saved run to go on with; None to go on with `run`.

        Raises:
          BadStep: as the policy says.
        """
        for number, record in enumerate(records):
            bad = self._reader.bad.pop(record.step, None)
            self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
            self._worked |= not record.metrics.get("bad")
            if bad is None or self._tolerates(bad, ends=ends):
                continue
            call_with_records(callbacks, records[: number + 1])
            why = describe_bad(bad, record.metrics["loss"], record.step)
            if isinstance(self._policy, Rollback) and not ends:
                return self._go_back(run, record.step, why)
            if self._policy == "skip" and not bad.params:
                why += f", and so were all of the {IN_A_ROW} last steps: skipping does not help"
                raise BadStep(why, step=record.step, run=run)
            raise BadStep(why, advise(bad), record.step, run)
        return None

    def _tolerates(self, bad: Bad, *, ends: bool) -> bool:
        if bad.params:
            return False  # nothing is left that could go on
        return self._bad_in_a_row < IN_A_ROW if self._policy == "skip" else ends and isinstance(self._policy, Rollback)

    def check_worked(self, run: TrainState, steps: int) -> None:
        """Raise `BadStep` if all steps were bad, so that training changed nothing."""
        if steps > 0 and not self._worked:
            last = int(run.step)
            raise BadStep(
                f"all {steps} steps were bad, the last of them step {last}; nothing was trained", "", last, run
            )

    def _go_back(self, run: TrainState, step: int, why: str) -> TrainState:
        assert isinstance(self._policy, Rollback)
        try:
            saved, position = self._policy.restore()
        except (OSError, ValueError) as error:
            raise BadStep(f"{why}, and there is no run to go back to: {error}", step=step, run=run) from error
        back = int(saved.step)
        self._returns[back] += 1
        if self._returns[back] > self._policy.limit:
            raise BadStep(
                f"{why}, after {self._policy.limit} returns to step {back}: leaving batches out does not help; lower "
                "the learning rate, or start from an earlier saved run",
                step=step,
                run=run,
            )
        self._feed.left_out.add(step)
        self._feed.go_back(back, position)
        # On accelerators a later step may have run already and wait to be read: it is taken again, so its record goes.
        self._reader.forget()
        return saved


def _check_takes_every_step(run: TrainState) -> None:
    """Raise ValueError under `js.local`, where a skipped step would skip a synchronisation too."""
    if isinstance(run.opt_state, LocalState):
        raise ValueError(
            "fit: bad_steps=js.Rollback(...) leaves out steps, also those after which the replicas of js.local "
            "are synchronised; use bad_steps='skip', under which a replica with a bad batch keeps what it had and the "
            "others go on"
        )
