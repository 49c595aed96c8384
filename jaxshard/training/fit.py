"""`fit`: a plain training loop, with callbacks to write, draw or save."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxshard.core.batch import check_several_batches
from jaxshard.core.compat import forget_profile
from jaxshard.core.counts import check_count
from jaxshard.core.file_errors import errno_of
from jaxshard.core.local_path import check_local
from jaxshard.core.tree import row_count
from jaxshard.core.types import PyTree
from jaxshard.storage.paths import AnyPath, ObjectPath
from jaxshard.training.early_stopping import EarlyStopping
from jaxshard.training.goodput import Ledger
from jaxshard.training.goodput_file import kept_on_disk, place_for_launch, read_ledger
from jaxshard.training.judge import Judge
from jaxshard.training.metrics.writer import Writer, finishing
from jaxshard.training.non_finite import BadSteps
from jaxshard.training.progress import Reporter, View
from jaxshard.training.progress_views import choose_view
from jaxshard.training.records import Metrics, Reader, call_with_records
from jaxshard.training.recovery import Feed, Recovery
from jaxshard.training.state import TrainState, check_is_run, check_not_donated
from jaxshard.training.step import Step

PROFILE_SCHEMES = ("gs",)
"""The schemes of remote addresses to which JAX can write profiles."""

_TRACED = (3, 5)
"""The first and the last profiled step, counted from the start of `fit`; the first two steps compile and warm up."""


def fit(
    run: TrainState,
    step: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
    batches: Iterable[PyTree],
    *,
    steps: int,
    evaluate: Callable[[TrainState], dict[str, float]] | None = None,
    eval_every: int | None = None,
    patience: int | None = None,
    stop: Callable[[Mapping[str, float]], bool] | None = None,
    callbacks: Iterable[Writer] = (),
    on_run: Iterable[Callable[[int, TrainState], Any]] = (),
    tokens: int | None = None,
    flops: float | None = None,
    profile: str | Path | None = None,
    bad_steps: BadSteps = "raise",
    progress: bool | View | None = None,
) -> TrainState:
    """Train until the run has taken `steps` optimizer steps, or stop early.

    Each batch is used for one step. On a CPU the metrics of a step are read at once, on accelerators one step late, so
    that the device never waits for Python.

    Args:
      run: the `TrainState` to continue from; it is donated to the first step.
      step: a step of `js.make_step`, or any function `(run, batch) -> (run, metrics)` with scalar metrics.
      batches: an iterable of global batches for `step`, the first of them for the run's next step.
      steps: the total number of steps, counted by `run.step`: if the run has taken as many already, it is returned
        unchanged.
      evaluate: `evaluate(run) -> {name: number}`, called every `eval_every` steps and after the last one.
      patience: stop after this number of evaluations in a row without a new lowest "loss": short for
        `stop=js.EarlyStopping(patience)`.
      stop: `stop(metrics) -> bool`, called with the result of every evaluation and the step's "update_norm"; without
        `evaluate` with the metrics of every step that was not bad. True ends the training. A `js.EarlyStopping` tells
        afterwards why it ended, and with which metrics; all its rules but `min_update` need `evaluate`. With a
        `js.Checkpointer` in `on_run` it goes on after a restart: its evaluations are in the file `.early_stopping.json`
        of the folder. If it had ended the training, `fit` warns and takes no step; delete the file to train on. If the
        run is at a step whose evaluation was interrupted, `fit` first evaluates it.
      callbacks: functions that are called with the `Record` of every step, in order, when its metrics are on the host.
        If a callback has a method `finish(error)` (`js.metrics.wandb`), it is called at the end, also if training
        fails.
      on_run: functions that are called with the number of the step and the run after it, right after the step is
        started, to save the run (`js.Checkpointer`) or sample from it; the next step donates the run's arrays. If a
        function returns True, training ends after this step (`js.distributed.Preemption`); in several processes all
        must return it after the same step. Optional methods: the context `paused()` (`js.distributed.Watchdog`) is
        entered during evaluation and these callbacks; `evaluated(step, run, evaluation)` (`js.Checkpointer`) is called
        with the result of every evaluation, and `resumed`, with the same arguments, at the start with the evaluation of
        the step that the run is at; `ended(run)` (`js.Checkpointer`, which saves it) with the last run, unless
        training fails; `finish(error)` (`js.ReplicaWatch`) at the end, as for `callbacks`.
      tokens: tokens in a batch, for "tokens_per_second".
      flops: model FLOPs of a step over all devices, for "flops_per_second" and "mfu". By default those of
        `Step.model_flops`, for which the loss is traced once more; 0 for none. They are not known for a `step` that is
        a plain function.
      profile: a folder for a `jax.profiler` trace of the third to the fifth step, which `js.read_profile` reads, or an
        address gs://... as a string.
      bad_steps: what to do about a loss or gradient that is not finite. Such a step changes only the step count, so
        that later steps keep their batches and random keys. "raise" stops; "skip" goes on, and the records show it;
        both raise if an update makes parameters infinite or NaN, since no step can follow.
        `js.Rollback(checkpointer.restore)` goes back to a saved run and repeats the steps since then without the bad
        batch: the callbacks receive records of the repeated steps again, and `batches` must come from `js.batches` or
        `js.local_batches`, or have a `seek` like theirs. All three need the metric "bad" of `js.make_step`; without it
        every step counts as good. If all steps were bad, `fit` raises at its end.
      progress: by default a live line on a terminal (standard error) or in a notebook: what is compiled and for how
        long, then step, loss, speed, MFU, memory and the time left; at the end the goodput. With True also in a pipe or
        file, as about ten lines; with False never. A function is called with a `js.Progress` instead, at the start of
        each phase and after each step. Only the first process shows or calls anything.

    The wall time is counted by kind (`js.Goodput`), with a `js.Checkpointer` in `on_run` over all processes that go on
    with the run: in the file `.goodput.json` of its folder.

    Returns:
      The run after the last step.

    Raises:
      OSError: the profile can't be written.
      BadStep: a bad step, with the run in the exception's attribute `run`; with "skip" only the 50th bad step in a row;
        with a rollback only a step that is bad again after `limit` returns; at the end, if all steps were bad.
      ValueError: the batches are empty; `eval_every` or `patience` without `evaluate`, or below 1; a
        `js.EarlyStopping`, or a checkpointer that keeps the best run, without `evaluate`; `patience` together with
        `stop`, or with an evaluation that has no "loss"; a run that was donated to an earlier step; `js.Rollback` for a
        run under `js.local`; a `profile` at another address than gs://.
      TypeError: `run` is no TrainState; `evaluate`, `stop` or `progress` is no function; `js.Rollback` with
        batches that can't go back.

    Example:
        history = []     # a list's `append` is a callback that keeps all records
        run = js.fit(run, step, batches, steps=1000, callbacks=[history.append],
                     evaluate=lambda run: js.evaluate(eval_step, run, held_out), eval_every=100, patience=3)
    """
    _check_arguments(run, step, batches, steps)
    if profile is not None:
        check_local(profile, schemes=PROFILE_SCHEMES)
    callbacks, on_run = tuple(callbacks), tuple(on_run)
    stop = _check_evaluation(evaluate, eval_every, patience, stop)
    _check_judges(evaluate, stop, on_run)
    start = done = int(run.step)
    view = choose_view(progress)
    reporter = Reporter(view, start, steps)
    file = _find_ledger(on_run)
    folder = None if file is None else file.parent
    keeps_best = any(_metric_of_best(function) is not None for function in on_run)
    judge = Judge(stop, folder, start, evaluates=evaluate is not None, keeps_best=keeps_best)
    ledger = read_ledger(file, start, compiled=step.compile_seconds if isinstance(step, Step) else 0.0)
    reader = Reader(run.step.sharding.device_set, ledger, tokens=tokens)
    feed = Feed(batches, start, steps)
    recovery = Recovery(bad_steps, feed, reader, run)
    is_read = bool(callbacks) or view is not None  # else nobody learns of the FLOPs, which cost a trace of the loss
    take = _Take(step, flops if is_read else 0, reader, ledger, reporter)
    closed = (*callbacks, *on_run, *(() if view is None else (view,)))
    traced = ends = False

    with finishing(closed), kept_on_disk(ledger, file), contextlib.ExitStack() as trace:
        if evaluate is not None and judge.keeps and start and _is_due(start, steps, eval_every):
            _catch_up(judge, evaluate, run, on_run, ledger, reporter)
        for done, batch in () if judge.ended else _timed(feed, reader, ledger):
            if profile is not None and not traced and done - start == min(_TRACED[0], steps - start):
                traced = True  # once, also where steps are taken again
                trace.enter_context(_profiled(profile))
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                run, metrics = recovery.leave_out(run) if done in feed.left_out else take(run, batch)
            reader.add(done, metrics, row_count(batch))
            with _pause_watchers(on_run):
                answers = [_call(function, done, run, ledger) for function in on_run]
            ends = any(answer is True for answer in answers)
            if on_run:
                ledger.spend("steps")
            if profile is not None and done - start == _TRACED[1]:
                jax.block_until_ready(run)
                trace.close()

            # First read metrics, then recover from bad steps, then evaluate and call callbacks: so callbacks receive
            # each record once, complete, and an evaluation never sees a run that is rolled back. A step that evaluates,
            # or the last step, reads all records, because it needs its own.
            evaluates = evaluate is not None and _is_due(done, steps, eval_every)
            records = reader.read(all=evaluates or ends or done == steps)
            with _pause_watchers(on_run):
                earlier = recovery.recover(run, records, callbacks, ends=ends)
            if earlier is not None:
                run = earlier
                ledger.go_back(int(run.step))
                continue
            ledger.took(done)
            if evaluate is not None and evaluates:
                evaluation = _evaluate(evaluate, done, run, on_run, ledger, reporter)
                _tell("evaluated", done, run, evaluation, on_run, ledger)
                records[-1] = records[-1]._replace(evaluation=evaluation)
                reader.restart()
                ledger.spend("callbacks")
            call_with_records(callbacks, records)
            reporter.records(records)
            if judge(records) or ends:
                break
        else:
            _check_end(start, done, start if judge.ended else steps)
        ledger.spend("steps")
        records = reader.read(all=True)  # of a step that was started before the end was known
        recovery.recover(run, records, callbacks, ends=True)
        call_with_records(callbacks, records)
        reporter.records(records)
        if not ends:  # one that was stopped from outside may have had no time for a good step
            recovery.check_worked(run, done - start)
        _end(on_run, run, ledger)
        ledger.ended = not ends
        reporter.finish(ledger.goodput)
    return run


class _Take:
    """The step, whose first call also counts its FLOPs and tells that it compiles.

    Args:
      step: the step of the user.
      flops: the model FLOPs that the user gave; None to count them.
      reader: receives the FLOPs.
      ledger: counts the time of compilation.
      reporter: tells of it.
    """

    def __init__(self, step: Any, flops: float | None, reader: Reader, ledger: Ledger, reporter: Reporter):
        self._step, self._flops, self._is_first = step, flops, True
        self._reader, self._ledger, self._reporter = reader, ledger, reporter

    def __call__(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        taken: tuple[TrainState, Metrics]
        if not self._is_first:
            taken = self._step(run, batch)
            return taken
        self._is_first = False
        step, began = self._step, time.perf_counter()
        compiled = step.compile_seconds if isinstance(step, Step) else 0.0
        if not compiled:
            self._reporter.phase("compiling", int(run.step))
        flops = self._flops
        if flops is None and isinstance(step, Step):
            flops = step.model_flops(batch)
        self._reader.flops = flops or None
        counting = time.perf_counter() - began
        taken = step(run, batch)
        # Nobody can tell how long a plain function compiled: its first call counts as compilation.
        spent = counting + step.compile_seconds - compiled if isinstance(step, Step) else time.perf_counter() - began
        self._ledger.move("steps", "compile", spent)
        return taken


def _timed(feed: Feed, reader: Reader, ledger: Ledger) -> Iterator[tuple[int, PyTree]]:
    """Yield the batches of a feed, and count the wait for each as input wait, unless a device computes meanwhile."""
    ledger.spend("input wait")
    for numbered in feed:
        ledger.spend("steps", was="steps" if reader.is_busy else None)
        yield numbered
        ledger.spend("input wait")


def _is_due(step: int, steps: int, eval_every: int | None) -> bool:
    """Return True if an evaluation follows a step: the last one, or one whose number `eval_every` divides."""
    return step == steps or (step < steps and eval_every is not None and step % eval_every == 0)


def _evaluate(
    evaluate: Callable[[TrainState], dict[str, float]],
    step: int,
    run: TrainState,
    on_run: Sequence[Callable[..., Any]],
    ledger: Ledger,
    reporter: Reporter,
) -> dict[str, float]:
    reporter.phase("evaluating", step)
    ledger.spend("evaluation")
    with _pause_watchers(on_run):
        return evaluate(run)


def _catch_up(
    judge: Judge,
    evaluate: Callable[[TrainState], dict[str, float]],
    run: TrainState,
    on_run: Sequence[Callable[..., Any]],
    ledger: Ledger,
    reporter: Reporter,
) -> None:
    """Evaluate the run that training goes on from unless its evaluation was kept, and tell it to checkpointers.

    They learn a kept evaluation too, since the earlier process may have ended while they saved the best run.
    """
    step, evaluation = int(run.step), judge.known
    if evaluation is None:
        evaluation = _evaluate(evaluate, step, run, on_run, ledger, reporter)
        judge.catch_up(evaluation)
    _tell("resumed", step, run, evaluation, on_run, ledger)


def _tell(
    method: str,
    step: int,
    run: TrainState,
    evaluation: Mapping[str, float],
    on_run: Sequence[Callable[..., Any]],
    ledger: Ledger,
) -> None:
    """Tell an evaluation to the functions of `on_run` that have the method, "evaluated" or "resumed"."""
    ledger.spend("checkpoint wait")
    with _pause_watchers(on_run):
        for function in on_run:
            if hasattr(function, method):
                getattr(function, method)(step, run, evaluation)


def _call(function: Callable[[int, TrainState], Any], step: int, run: TrainState, ledger: Ledger) -> Any:
    """Call a function of `on_run`; its time is checkpoint wait if it has a method `restore`, as checkpointers do."""
    ledger.spend("checkpoint wait" if hasattr(function, "restore") else "callbacks")
    return function(step, run)


def _end(on_run: Sequence[Callable[..., Any]], run: TrainState, ledger: Ledger) -> None:
    """Give the last run to the functions of `on_run` that have a method `ended`."""
    ledger.spend("checkpoint wait")
    with _pause_watchers(on_run):
        for function in on_run:
            if hasattr(function, "ended"):
                function.ended(run)
    ledger.spend("steps")


def _find_ledger(on_run: Sequence[Callable[..., Any]]) -> AnyPath | None:
    """Return the file of the goodput ledger: in the folder of the first `js.Checkpointer`, if there is one.

    Only the first process writes one.
    """
    if jax.process_index() != 0:
        return None
    files = [getattr(function, "ledger", None) for function in on_run]
    return place_for_launch(next((file for file in files if isinstance(file, Path | ObjectPath)), None))


@contextlib.contextmanager
def _profiled(folder: str | Path) -> Iterator[None]:
    """Profile the code inside the `with` block; raise an OSError that names the folder if writing fails."""
    jax.profiler.start_trace(str(folder))
    try:
        yield
    except BaseException:
        try:
            jax.profiler.stop_trace()
        except jax.errors.JaxRuntimeError:
            forget_profile()
        raise
    try:
        jax.profiler.stop_trace()
    except jax.errors.JaxRuntimeError as error:
        forget_profile()
        number = errno_of(error) or errno.EIO
        raise OSError(number, f"the profile could not be written: {os.strerror(number)}", str(folder)) from None


def _pause_watchers(on_run: Sequence[Callable[[int, TrainState], Any]]) -> contextlib.ExitStack:
    """Enter the `paused()` contexts of the callbacks, so that watchdogs ignore time spent outside of steps."""
    with contextlib.ExitStack() as stack:
        for function in on_run:
            if hasattr(function, "paused"):
                stack.enter_context(function.paused())
        return stack.pop_all()


def _check_arguments(run: Any, step: Any, batches: Any, steps: Any) -> None:
    """Raise if arguments are swapped or have wrong types, if the run was donated, or `batches` is a single batch."""
    if not isinstance(run, TrainState) and any(isinstance(x, TrainState) for x in (step, batches)):
        raise TypeError("fit: the arguments are in another order; write js.fit(run, step, batches, steps=...)")
    check_is_run(run)
    check_not_donated(run)
    if not callable(step):
        wrong = f"a {type(step).__name__}"
        raise TypeError(f"fit: step must be a function (run, batch) -> (run, metrics) of js.make_step, got {wrong}")
    check_several_batches("fit", batches)
    check_count("fit", least=0, steps=steps)


def _check_evaluation(
    evaluate: Any, eval_every: int | None, patience: int | None, stop: Callable[[Mapping[str, float]], bool] | None
) -> Callable[[Mapping[str, float]], bool] | None:
    """Return the early-stopping rule: `stop`, or a rule made from `patience`, or None; raise if they don't fit."""
    check_count("fit", eval_every=eval_every, patience=patience)
    for what, function in (
        ("evaluate must be a function run -> {name: number}", evaluate),
        ("stop must be a function metrics -> bool, such as js.EarlyStopping(3)", stop),
    ):
        if function is not None and not callable(function):
            raise TypeError(f"fit: {what}, got {type(function).__name__}")
    for name, value in (("eval_every", eval_every), ("patience", patience)):
        if value is not None and evaluate is None:
            raise ValueError(f"fit: {name}={value} needs evaluate=, a function run -> {{name: number}}")
    if patience is None:
        return stop
    if stop is not None:
        raise ValueError(f"fit: patience={patience} beside stop=; write stop=js.EarlyStopping({patience}, ...) alone")
    if eval_every is None:
        raise ValueError(f"fit: patience={patience} counts evaluations, so it needs eval_every=")
    return EarlyStopping(patience)


def _check_judges(evaluate: Any, stop: Any, on_run: Sequence[Callable[..., Any]]) -> None:
    """Raise ValueError if `evaluate` is None, but the stopping rule or a callback reads results of evaluations."""
    if evaluate is not None:
        return
    if isinstance(stop, EarlyStopping) and stop.judges_evaluations:
        raise ValueError("fit: the patience= and max_worse= of js.EarlyStopping judge evaluations; give evaluate=, too")
    for function in on_run:
        if (best := _metric_of_best(function)) is not None:
            kind = type(function).__name__
            raise ValueError(
                f"fit: {kind} keeps the run with the best {best!r} of the evaluations; give evaluate=, too"
            )


def _metric_of_best(function: Callable[..., Any]) -> str | None:
    """Return the metric whose best run a callback keeps, or None. A callback may have another `best` of its own."""
    best = getattr(function, "best", None)
    return best if hasattr(function, "evaluated") and isinstance(best, str) else None


def _check_end(start: int, done: int, steps: int) -> None:
    if start == done < steps:
        raise ValueError(f"fit: no batch for step {start + 1} of {steps}; the data is empty or its iterator used up")
    if done < steps:
        warnings.warn(f"fit: the batches ended after step {done} of {steps}; repeat them to go on", stacklevel=3)
