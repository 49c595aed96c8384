"""`fit`: a training loop that reads top to bottom; what writes, draws or saves comes in as callbacks."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxshard._bad import GO_ON, IN_A_ROW, Bad, BadStep, BadSteps, Rollback, explain, is_finite
from jaxshard._state import TrainState
from jaxshard._typing import PyTree
from jaxshard.plan.hardware import mfu

Metrics = dict[str, Any]

_TRACED = (3, 5)
"""The steps, counted from the start of `fit`, that a profile shows: the first ones are not typical."""


class Record(NamedTuple):
    """One optimizer step in numbers that lie on the host.

    Attributes:
      step: how many optimizer steps the run has taken.
      metrics: "loss", "grad_norm" and what else the step returned; "bad" is 1.0 where the batch changed nothing because
        loss or gradients were not finite (both NaN for a batch that `js.Rollback` left out), else 0.0.
      seconds: wall time since the step before, evaluation excluded; the first one of a `fit` may have compiled.
      speed: "tokens_per_second" or "rows_per_second"; "flops_per_second" and "mfu" (model FLOPs utilisation, 1 is all
        that the chips can do) where they are known.
      evaluation: what `evaluate` returned after this step; None after most.
    """

    step: int
    metrics: dict[str, float]
    seconds: float
    speed: dict[str, float]
    evaluation: dict[str, float] | None = None


def fit(
    run: TrainState,
    step: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
    batches: Iterable[PyTree],
    *,
    steps: int,
    evaluate: Callable[[TrainState], dict[str, float]] | None = None,
    eval_every: int | None = None,
    patience: int | None = None,
    callbacks: Iterable[Callable[[Record], Any]] = (),
    on_run: Iterable[Callable[[int, TrainState], Any]] = (),
    tokens: int | None = None,
    flops: float | None = None,
    profile: str | Path | None = None,
    bad_steps: BadSteps = "raise",
) -> TrainState:
    """The run after `steps` optimizer steps in total (fewer where it stopped early); the run that goes in is donated.

    Every batch is a step. On a CPU the numbers of a step are read at once, on accelerators one step late, so that the
    device never waits for Python. A list's `append` is a callback that keeps the history:

        history = []
        run = js.fit(run, step, batches, steps=1000, callbacks=[history.append],
                     evaluate=lambda run: js.evaluate(eval_step, run, held_out), eval_every=100, patience=3)

    Args:
      step: what `js.make_step` returned, or any function `(run, batch) -> (run, metrics)` with scalar metrics.
      steps: the total, counted by `run.step`: a run that has taken them already comes back as it is.
      evaluate: `evaluate(run) -> {name: number}`, called every `eval_every` steps and after the last one.
      patience: stop after so many evaluations in a row whose "loss" was not below the lowest before them.
      callbacks: each is called with the `Record` of every step, in order, once its numbers are on the host.
      on_run: each is called with the number of the step and the run after it, right after the step was started, so that
        it can save the run (`js.Checkpointer`) or sample from it; the next step takes the run's arrays away. One that
        returns True ends the training after this step (`js.distributed.Preemption`); in several processes all must
        return it after the same step. The method `paused()` of one that has it (`js.distributed.Watchdog`), a context,
        is entered for what is no step: evaluation and these callbacks.
      tokens: tokens in a batch, for "tokens_per_second"; without it rows are counted.
      flops: model FLOPs of a step over all devices (`jaxshard.plan.flops.train_flops`), for "flops_per_second", "mfu".
      profile: a folder for a `jax.profiler` trace of the third to the fifth step.
      bad_steps: what to do about a loss or gradient that is not finite, known as late as all numbers. Such a step
        changes nothing but its number, so that later steps have the batches and random keys that they would have had.
        "raise" stops; "skip" goes on, and the records count; `js.Rollback(checkpointer.restore)` goes back to a saved
        run and takes its steps again without that batch: their records come again, and `batches` must be those of
        `js.batches` or `js.local_batches`, or have their `seek`. All three need the "bad" of `js.make_step`; without
        it nothing is looked at.

    Raises:
      BadStep: a step that is bad, with the run in its attribute `run`; for "skip" the 50th in a row; for a rollback
        one that goes on being bad.
      ValueError: no batch where a step was to be taken; `eval_every` or `patience` without `evaluate`, or below 1;
        `patience` with an evaluation that has no "loss".
    """
    _check_evaluation(evaluate, eval_every, patience)
    callbacks, on_run = tuple(callbacks), tuple(on_run)
    start = done = int(run.step)
    devices = run.step.sharding.device_set
    reader = _Reader(devices, tokens=tokens, flops=flops)
    feed = _Feed(batches, start, steps)
    guard = _Guard(bad_steps, feed, reader)
    losses: dict[int, float] = {}
    traced = False

    with contextlib.ExitStack() as trace:
        for done, batch in feed:
            if profile is not None and not traced and done - start == min(_TRACED[0], steps - start):
                traced = True  # once, also where steps are taken again
                trace.enter_context(jax.profiler.trace(str(profile)))
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                run, metrics = guard.left_out(run) if done in feed.left_out else step(run, batch)
            reader.add(done, metrics, _row_count(batch))
            with _aside(on_run):
                answers = [function(done, run) for function in on_run]
            ends = any(answer is True for answer in answers)
            if profile is not None and done - start == _TRACED[1]:
                jax.block_until_ready(run)
                trace.close()

            evaluates = evaluate is not None and (done == steps or done % (eval_every or steps) == 0)
            records = reader.read(all=evaluates or ends or done == steps)
            with _aside(on_run):
                earlier = guard.after(run, records, callbacks, ends=ends)
            if earlier is not None:
                run = earlier
                continue
            if evaluate is not None and evaluates:
                with _aside(on_run):
                    evaluation = evaluate(run)
                losses[done] = _loss_of(evaluation, patience)
                records[-1] = records[-1]._replace(evaluation=evaluation)
                reader.restart()
            _call(callbacks, records)
            if ends or (patience is not None and evaluates and _is_stuck([*losses.values()], patience)):
                break
        else:
            records = reader.read(all=True)
            guard.after(run, records, callbacks, ends=True)
            _call(callbacks, records)
            _check_end(start, done, steps)
    return run


class _Feed(Iterator[tuple[int, PyTree]]):
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


class _Guard:
    """What happens after bad steps."""

    def __init__(self, policy: BadSteps, feed: _Feed, reader: _Reader):
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
            _call(callbacks, records[: number + 1])
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


class _Reader:
    """The numbers of steps under way: read as soon as they are there on a CPU, one step late elsewhere."""

    def __init__(self, devices: Collection[jax.Device], *, tokens: int | None, flops: float | None):
        self._device, self._devices = next(iter(devices)), len(devices)
        self._late = self._device.platform != "cpu"
        self._tokens, self._flops = tokens, flops
        self._unread: deque[tuple[int, Metrics, int]] = deque()
        self.bad: dict[int, Bad] = {}
        self._mark = time.perf_counter()

    def add(self, step: int, metrics: Metrics, rows: int) -> None:
        self._unread.append((step, metrics, rows))

    def read(self, *, all: bool) -> list[Record]:
        """The records that are due, or all of them, which waits for the device."""
        records = []
        while len(self._unread) > (self._late and not all):
            step, metrics, rows = self._unread.popleft()
            metrics = jax.device_get(metrics)
            numbers = {name: float(x) for name, x in metrics.items()}
            bad = metrics.get("bad")
            if isinstance(bad, Bad) and bad:
                self.bad[step] = bad
            seconds = time.perf_counter() - self._mark
            self._mark += seconds
            records.append(Record(step, numbers, seconds, self._speed(seconds, rows)))
        return records

    def forget(self) -> None:
        """Drops what was not read, of steps that are taken again."""
        self._unread.clear()
        self.bad.clear()
        self.restart()

    def restart(self) -> None:
        """Lets the time since the last reading not count."""
        self._mark = time.perf_counter()

    def _speed(self, seconds: float, rows: int) -> dict[str, float]:
        unit, count = ("rows", rows) if self._tokens is None else ("tokens", self._tokens)
        speed = {f"{unit}_per_second": count / seconds}
        if self._flops is not None:
            rate = speed["flops_per_second"] = self._flops / seconds
            cores = getattr(self._device, "num_cores", None)
            share = mfu(rate, self._device.device_kind, self._devices, num_cores=cores)
            speed |= {} if share is None else {"mfu": share}
        return speed


def _aside(on_run: Sequence[Callable[[int, TrainState], Any]]) -> contextlib.ExitStack:
    """A context for what is no step, in which callbacks that watch the time of steps pause."""
    with contextlib.ExitStack() as stack:
        for function in on_run:
            if hasattr(function, "paused"):
                stack.enter_context(function.paused())
        return stack.pop_all()


def _call(callbacks: Sequence[Callable[[Record], Any]], records: Sequence[Record]) -> None:
    for record in records:
        for callback in callbacks:
            callback(record)


def _is_stuck(losses: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` losses was below the lowest before them; NaN is below nothing."""
    before, last = losses[:-patience], losses[-patience:]
    lowest = min((loss for loss in before if not math.isnan(loss)), default=math.inf)
    return bool(before) and not any(loss < lowest for loss in last)


def _loss_of(evaluation: dict[str, float], patience: int | None) -> float:
    if patience is not None and "loss" not in evaluation:
        raise ValueError(f'fit: patience needs an evaluation with a "loss", got {sorted(evaluation)}')
    return evaluation.get("loss", math.nan)


def _row_count(batch: PyTree) -> int:
    return max((np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)), default=0)


def _check_evaluation(evaluate: Any, eval_every: int | None, patience: int | None) -> None:
    for name, value in (("eval_every", eval_every), ("patience", patience)):
        if value is not None and value < 1:
            raise ValueError(f"fit: {name} must be at least 1, got {value}")
        if value is not None and evaluate is None:
            raise ValueError(f"fit: {name}={value} needs evaluate=, a function run -> {{name: number}}")
    if patience is not None and eval_every is None:
        raise ValueError(f"fit: patience={patience} counts evaluations, so it needs eval_every=")


def _check_end(start: int, done: int, steps: int) -> None:
    if start == done < steps:
        raise ValueError(f"fit: no batch for step {start + 1} of {steps}; the data is empty or its iterator used up")
    if done < steps:
        warnings.warn(f"fit: the batches ended after step {done} of {steps}; repeat them to go on", stacklevel=3)
