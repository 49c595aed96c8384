"""`jaxshard train`: train a language model on text, sharded over a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checkpoint.memory.checkpointer import MemoryCheckpointer
from jaxshard.commands.engine import check_feedback
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.experts import count_experts
from jaxshard.commands.flags import Train
from jaxshard.commands.job import Job
from jaxshard.commands.outputs import check_folder
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.program import depth_of
from jaxshard.commands.replicas import make_copies
from jaxshard.commands.result import describe_step, draw_sample, summarize, why_no_sample, write_json
from jaxshard.commands.saving import Saving, check_export, describe_memory, make_saving
from jaxshard.commands.terminal import facts, progress, start, tables, working
from jaxshard.core.compat import process_count_and_id
from jaxshard.core.types import PyTree
from jaxshard.data.batches import batches
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hard_exit import restore_sigterm
from jaxshard.distributed.preemption import Preemption
from jaxshard.distributed.watchdog import Watchdog
from jaxshard.hf.save import save
from jaxshard.training import metrics
from jaxshard.training.evaluate import evaluate, make_eval_step
from jaxshard.training.fit import PROFILE_SCHEMES, fit
from jaxshard.training.metrics.events import SCHEMES
from jaxshard.training.metrics.writer import finishing
from jaxshard.training.non_finite import BadSteps, Rollback
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState, init
from jaxshard.training.step import Step, make_step

_FILES = ("json", "log", "tensorboard", "profile", "save_config")
_RECORDS: dict[str, Any] = dict.fromkeys((*_FILES, "wandb", "mlflow"))
"""Outputs that only the first of several processes writes."""


class _Start(NamedTuple):
    """The state that a training starts from.

    Attributes:
      run: the saved run, or None for a new one.
      weights: those that a new run begins with, or None.
      memory: what keeps the run in memory, or None.
      saver: the context of what saves the run; of None if nothing does.
      recalled: the run came from memory.
    """

    run: TrainState | None
    weights: PyTree
    memory: MemoryCheckpointer | None
    saver: AbstractContextManager[Checkpointer | None]
    recalled: bool

    @property
    def step(self) -> int:
        """The number of steps that were taken."""
        return 0 if self.run is None else int(self.run.step)


def run(flags: Train) -> None:
    """Train a ready-made model, print how it goes, and write what was asked for."""
    with usage_errors():
        initialize()
    restore_sigterm()  # until there is a run to save
    written = [Path(getattr(flags, name)) for name in _FILES if getattr(flags, name) is not None]
    is_first = process_count_and_id()[1] == 0
    console = start(flags, quiet=not is_first)
    if not is_first:
        flags = replace(flags, **_RECORDS)
    with usage_errors():
        _check_flags(flags)
        saves = make_saving(flags, others=written)
        how = make_parallel(
            flags,
            remat=flags.remat,
            precision=flags.precision,
            ordered=flags.ordered,
            depth=depth_of(flags.model, flags.change),
            batch=flags.batch,
        )
        facts(console, how.shown)
        job = Job(console, flags, how)
        check_export(flags.export, job.network)
        copies = make_copies(flags.check_replicas, job.layout, saves)
        begin = _find_start(console, job, saves)
        check_feedback(how.engine, job.layout, begin.run, saves.memory_every)
        writers = _open_writers(job, saves.folder)
    memory = describe_memory(begin.memory, begin.step if begin.recalled else None)
    facts(console, job.shown | saves.shown | memory | copies.shown)
    sample = flags.sample
    if sample and (why := why_no_sample(job.network, job.layout)):
        console.print(f"note: there is no sample at the end: {why}")
        sample = 0

    with finishing(writers):
        started = time.perf_counter()
        step, compiled, run = _compile(console, job, begin)
        compile_seconds, first = time.perf_counter() - started, begin.step
        begin = begin._replace(run=None, weights=None)  # or they would stay in memory
        steps = job.size.recipe.steps
        records: list[Record] = []
        eval_step = make_eval_step(job.network.evaluate, job.layout, engine=how.engine)
        with Preemption() as preemption:
            with progress(console, steps) as show, begin.saver as checkpointer:
                policy = _bad_step_policy(flags, checkpointer, run)
                with _watchdog() as watchdog:
                    after_step = (begin.memory, checkpointer, preemption, watchdog)
                    run = fit(
                        run,
                        step,
                        batches(job.source, job.layout, start=run.step),
                        steps=steps,
                        evaluate=lambda run: evaluate(eval_step, run, job.held_out),
                        eval_every=flags.eval_every or max(1, steps // 4),
                        patience=flags.patience,
                        callbacks=[records.append, *writers, show],
                        on_run=[*copies.callbacks, *(one for one in after_step if one is not None)],
                        tokens=job.tokens,
                        flops=job.flops,
                        profile=flags.profile,
                        bad_steps=policy,
                    )
                copies.check(run)
                if checkpointer is not None:
                    checkpointer.save(run)
            stopped = preemption.stopped and int(run.step) < steps
            result = job.about | {"start": first, "stopped": stopped} | summarize(records)
            result |= {"compile_seconds": compile_seconds} | describe_step(compiled, job.layout, job.rows)
            # Where it was stopped, something else waits for this process to end.
            result |= _look_at(job, run, result["evaluations"], 0 if stopped else sample, stopped)
            if flags.export is not None and not stopped:
                words = job.data.tokenizer
                save(flags.export, run, job.layout, tokenizer=None if words is None else words.file)
            tables(console, result)
            write_json(flags.json, result)
        if stopped:
            goes_on = "--resume goes on" if checkpointer else "nothing was saved, for want of --checkpoint"
            console.print(f"stopped by SIGTERM after step {int(run.step)} of {steps}; {goes_on}")


def _check_flags(flags: Train) -> None:
    """Raise ValueError for folders that can't be written, and for a rollback that can't be."""
    check_folder("--tensorboard", flags.tensorboard, SCHEMES)
    check_folder("--profile", flags.profile, PROFILE_SCHEMES)
    if flags.bad_steps != "rollback":
        return
    if flags.lora is not None:
        raise ValueError("--bad-steps rollback: the frozen model of --lora is in no checkpoint; use skip or raise")
    if flags.sync_every:
        raise ValueError(
            "--bad-steps rollback leaves out steps, also those after which --sync-every synchronises; use skip"
        )
    if flags.checkpoint is None:
        raise ValueError("--bad-steps rollback goes back to a saved run: add --checkpoint DIR")


def _find_start(console: Console, job: Job, saves: Saving) -> _Start:
    """Find the run to go on with, in memory or in a checkpoint, or the weights to begin with; print notes about it."""
    for note in saves.check_facts(job.sequence):
        console.print(f"note: {note}")
    saver = saves.checkpointer(job.layout, job.sequence)  # before it compiles: another training may save there
    memory = saves.memory(job.layout, job.sequence)
    run, notes = saves.recall(memory, job.sequence)
    for note in notes:
        console.print(f"note: {note}")
    if run is not None:
        return _Start(run, None, memory, saver, recalled=True)
    frozen = job.flags.lora is not None  # what is frozen is not in checkpoints
    weights = job.base.load(job.layout) if job.base is not None and (frozen or saves.resumed is None) else None
    return _Start(saves.restore_run(job.layout, weights if frozen else None), weights, memory, saver, recalled=False)


def _compile(console: Console, job: Job, begin: _Start) -> tuple[Step, jax.stages.Compiled, TrainState]:
    """Compile the step, and make the run if it is a new one."""
    step, run = make_step(job.network.loss, job.tx, job.layout, engine=job.how.engine), begin.run
    with working(console, "compiling"):
        with refusals():  # of names of activations, for example
            compiled = step.compile(job.rows)
        if run is None:
            run = init(job.network.init, job.tx, job.layout, job.flags.seed, init_from=begin.weights)
        jax.block_until_ready(run)
    return step, compiled, run


def _look_at(
    job: Job, run: TrainState, evaluations: list[dict[str, Any]], length: int, stopped: bool
) -> dict[str, Any]:
    """Return the loads of the trained model's experts, and a sample of its text, of so many tokens."""
    held_out = [] if stopped else job.held_out
    dropped = (evaluations or [{}])[-1].get("drop_rate")
    return {
        "experts": count_experts(job.network, run, job.layout, job.how.engine, held_out, dropped),
        "sample": draw_sample(
            job.network, run, job.layout, job.data, length=length, stops=job.stops, seed=job.flags.seed
        ),
    }


def _bad_step_policy(flags: Train, checkpointer: Checkpointer | None, run: TrainState) -> BadSteps:
    """What `fit` does about a bad step; for a rollback there is a saved run to go back to from the first step on."""
    if flags.bad_steps != "rollback":
        return flags.bad_steps
    assert checkpointer is not None, "train refuses --bad-steps rollback without --checkpoint"
    if int(run.step) == 0:
        checkpointer.save(run)
    return Rollback(checkpointer.restore)


def _watchdog() -> AbstractContextManager[Watchdog | None]:
    """A watchdog where there are several processes, which may wait for each other in vain."""
    return Watchdog() if jax.process_count() > 1 else nullcontext()


def _open_writers(job: Job, checkpoints: Path | None) -> list[metrics.Writer]:
    """Open what the numbers of steps are written to; a resumed run goes on in the runs whose ids lie beside it."""
    flags, config = job.flags, job.about | {"layout": job.layout}
    make: dict[str, Callable[[Any], metrics.Writer]] = {
        "log": metrics.json_lines,
        "tensorboard": partial(metrics.tensorboard, config=config),
        "wandb": partial(metrics.wandb, config=config, folder=checkpoints),
        "mlflow": partial(metrics.mlflow, config=config, folder=checkpoints),
    }
    return [open_writer(where) for name, open_writer in make.items() if (where := getattr(flags, name)) is not None]
