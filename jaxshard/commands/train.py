"""`jaxshard train`: train a language model on text, sharded over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from rich.console import Console

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checks.replicas import ReplicaWatch, check_replicas
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Train
from jaxshard.commands.job import Job
from jaxshard.commands.json_object import write_json
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.outputs import check_folder
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.result import (
    count_experts,
    describe_goodput,
    describe_step,
    draw_sample,
    predicted_bytes,
    summarize,
)
from jaxshard.commands.saving import Start, check_residuals, make_saving
from jaxshard.commands.terminal import facts, start, tables, working
from jaxshard.core.compat import process_count_and_id
from jaxshard.core.layout import Layout, human_bytes
from jaxshard.data.batches import batches
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hard_exit import restore_sigterm
from jaxshard.distributed.preemption import Preemption
from jaxshard.distributed.watchdog import Watchdog
from jaxshard.generation.generate import check_request
from jaxshard.hf.config import make_config
from jaxshard.hf.folder import CONFIG
from jaxshard.hf.save import save
from jaxshard.models.decoder import Decoder
from jaxshard.storage.paths import AnyPath, as_path
from jaxshard.training import metrics
from jaxshard.training.evaluate import evaluate, make_eval_step
from jaxshard.training.fit import PROFILE_SCHEMES, fit
from jaxshard.training.metrics.events import SCHEMES
from jaxshard.training.metrics.writer import finishing
from jaxshard.training.non_finite import BadSteps, Rollback
from jaxshard.training.progress_views import view_on
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState, init
from jaxshard.training.step import Step, make_step


def run(flags: Train) -> None:
    """Run `jaxshard train`: train a model, print its progress, and write checkpoints, logs and the JSON object."""
    with usage_errors():
        initialize()
    restore_sigterm()  # until there is a run to save
    is_first = process_count_and_id()[1] == 0
    console = start(flags, quiet=not is_first)
    with usage_errors():
        _check_flags(flags)
        written = (flags.json, flags.log, flags.tensorboard, flags.profile, flags.save_config)
        saves = make_saving(flags, others=[as_path(one) for one in written if one is not None])
        how = make_parallel(
            flags,
            remat=flags.remat,
            precision=flags.precision,
            ordered=flags.ordered,
            depth=NamedModel(flags.model, flags.change).depth,
            batch=flags.batch,
        )
        facts(console, how.shown)
        job = Job(console, flags, how)
        _check_export(flags.export, job.network)
        load, is_frozen = None if job.base is None else job.base.load, flags.lora is not None
        begin = saves.begin(job.layout, job.sequence, load, frozen=is_frozen)
        check_residuals(how.engine, job.layout, begin)
        comparisons, compared = _compare_copies(flags.check_replicas, job.layout, saves.intervals)
        writers = _open_writers(job, saves.folder)
    for note in begin.notes:
        console.print(f"note: {note}")
    facts(console, job.shown | begin.shown | compared)
    sample = _sample_length(console, job)

    with finishing(writers):
        first, steps = begin.step, job.size.recipe.steps
        if begin.run is not None and first >= steps:
            _end_without_steps(console, job, begin, begin.run, is_first=is_first)
            return
        with Preemption() as preemption:  # already while it compiles
            step, compiled, run = _compile(console, job, begin)
            begin = begin._replace(run=None, weights=None)  # or they would stay in memory
            records: list[Record] = []
            eval_step = make_eval_step(job.network.evaluate, job.layout, engine=how.engine)
            view = view_on(console)
            with begin.saver as checkpointer:
                policy = _bad_step_policy(flags, checkpointer, run)
                # Several processes may wait for each other in vain.
                with Watchdog() if jax.process_count() > 1 else nullcontext() as watchdog:
                    after_step = (begin.memory, checkpointer, preemption, watchdog)
                    run = fit(
                        run,
                        step,
                        batches(job.source, job.layout, start=run.step),
                        steps=steps,
                        evaluate=lambda run: evaluate(eval_step, run, job.held_out),
                        eval_every=flags.eval_every or max(1, steps // 4),
                        patience=flags.patience,
                        callbacks=[records.append, *writers],
                        on_run=[*comparisons, *(one for one in after_step if one is not None)],
                        tokens=job.tokens,
                        profile=flags.profile if is_first else None,
                        bad_steps=policy,
                        progress=view,
                    )
            stopped = preemption.stopped and int(run.step) < steps
            result = job.about | {"start": first, "stopped": stopped} | summarize(records)
            result |= {"compile_seconds": step.compile_seconds} | describe_step(compiled, job.layout, job.rows)
            result |= {"goodput": describe_goodput(view.last)} | dict.fromkeys(("experts", "sample"))
            if not stopped:  # then something else waits for this process to end
                result |= _look_at(job, run, result["evaluations"], sample)
                _export(job, run)
            if flags.profile is not None and records:
                where = "FOLDER, of a copy on this machine," if "://" in flags.profile else flags.profile
                facts(console, {"profile": f"jaxshard profile {where} says where the time went"})
            tables(console, result)
            write_json(flags.json if is_first else None, result)
        if stopped:
            goes_on = "--resume goes on" if checkpointer else "nothing was saved, for want of --checkpoint"
            console.print(f"stopped by SIGTERM after step {int(run.step)} of {steps}; {goes_on}")


def _check_flags(flags: Train) -> None:
    """Raise ValueError if an output folder can't be written, or if --bad-steps rollback contradicts another flag."""
    check_folder("--tensorboard", flags.tensorboard, SCHEMES)
    check_folder("--profile", flags.profile, PROFILE_SCHEMES)
    check_folder("--export", flags.export)
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


def _check_export(folder: AnyPath | None, network: Decoder) -> None:
    """Raise ValueError if --export can't work: the folder has a model, or Hugging Face has no format for the model."""
    if folder is None:
        return
    if (folder / CONFIG).exists():
        raise ValueError(f"--export {folder}: there is a model already; give another folder")
    try:
        make_config(network, "float32")
    except ValueError as error:
        raise ValueError(f"--export {folder}: {error}") from error


def _compare_copies(
    every: int | None, layout: Layout, intervals: tuple[int, ...]
) -> tuple[list[Callable[[int, TrainState], Any]], dict[str, str]]:
    """Make the callbacks of --check-replicas, which compare the copies of replicated arrays, and a line to print.

    Args:
      every: the number of steps between comparisons, or None for no comparison.
      layout: the layout of the run.
      intervals: the numbers of steps between saves; the run is also compared before every save.

    Returns:
      The callbacks for `js.fit`, and {"replicas": line}.
    """
    if every is None:
        return [], {}
    watch = ReplicaWatch(layout, every=every)

    def before_save(step: int, run: TrainState) -> None:
        if any(step % one == 0 for one in intervals):
            # On accelerators a comparison is read one step late.
            watch.wait() if step % every == 0 else check_replicas(run, layout)

    shown = f"{watch.arrays} arrays, {human_bytes(watch.bytes)} per device, compared every {every} steps"
    return [watch, before_save], {"replicas": shown if watch.arrays else "no array has copies to compare"}


def _sample_length(console: Console, job: Job) -> int:
    """Return the number of tokens to generate as a sample at the end; print a note and return 0 if the model can't."""
    if job.flags.sample:
        try:
            check_request(job.network, job.layout, [[0]], 1)
        except ValueError as error:  # such as a limit of capacity
            console.print(f"note: there is no sample at the end: {error}")
            return 0
    return job.flags.sample


def _compile(console: Console, job: Job, begin: Start) -> tuple[Step, jax.stages.Compiled, TrainState]:
    """Return (step, compiled step, run to start from); the run is initialized unless it was restored."""
    run = begin.run
    with working(console, "compiling"):
        with refusals():  # of names of activations, for example
            step = make_step(job.network.loss, job.tx, job.layout, engine=job.how.engine)
            compiled = step.compile(job.rows)
        if run is None:
            run = init(job.network.init, job.tx, job.layout, job.flags.seed, init_from=begin.weights)
        jax.block_until_ready(run)
    return step, compiled, run


def _end_without_steps(console: Console, job: Job, begin: Start, run: TrainState, *, is_first: bool) -> None:
    """Say that a resumed run has taken all its steps, without compiling; save it, and write the export and the JSON."""
    console.print(f"\n{begin.step} of {job.size.recipe.steps} steps are done; none is left to take")
    with begin.saver as checkpointer:
        if checkpointer is not None:
            checkpointer.save(run)  # a run from memory may be newer than the checkpoint
    _export(job, run)
    sizes = {"predicted": predicted_bytes(job.layout, job.rows), "compiled": {}}
    result = job.about | {"start": begin.step, "stopped": False} | summarize([])
    result |= {"compile_seconds": 0.0, "bytes_per_device": sizes, "collectives": []}
    result |= dict.fromkeys(("goodput", "experts", "sample"))
    write_json(job.flags.json if is_first else None, result)


def _export(job: Job, run: TrainState) -> None:
    """Write the trained model into the folder of --export, with its tokenizer, if the flag is given."""
    if job.flags.export is not None:
        words = job.data.tokenizer
        save(job.flags.export, run, job.layout, tokenizer=None if words is None else words.file)


def _look_at(job: Job, run: TrainState, evaluations: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """Return {"experts", "sample"}: the loads of the trained model's experts, and a text of `length` tokens."""
    network, layout, dropped = job.network, job.layout, (evaluations or [{}])[-1].get("drop_rate")
    return {
        "experts": count_experts(network, run, layout, job.how.engine, job.held_out, dropped),
        "sample": draw_sample(network, run, layout, job.data, length=length, stops=job.stops, seed=job.flags.seed),
    }


def _bad_step_policy(flags: Train, checkpointer: Checkpointer | None, run: TrainState) -> BadSteps:
    """Return the value of `js.fit(bad_steps=)`; for a rollback save a new run, so that there is a step to restore."""
    if flags.bad_steps != "rollback":
        return flags.bad_steps
    assert checkpointer is not None, "_check_flags refuses --bad-steps rollback without --checkpoint"
    if int(run.step) == 0:
        checkpointer.save(run)
    return Rollback(checkpointer.restore)


def _open_writers(job: Job, checkpoints: AnyPath | None) -> list[metrics.Writer]:
    """Open the writers of metrics (--log, --wandb ...); a resumed run finds its ids in the folder `checkpoints`."""
    flags, config = job.flags, job.about | {"layout": job.layout}
    make: dict[str, Callable[[Any], metrics.Writer]] = {
        "log": metrics.json_lines,
        "tensorboard": partial(metrics.tensorboard, config=config),
        "wandb": partial(metrics.wandb, config=config, folder=checkpoints),
        "mlflow": partial(metrics.mlflow, config=config, folder=checkpoints),
    }
    return [open_writer(where) for name, open_writer in make.items() if (where := getattr(flags, name)) is not None]
