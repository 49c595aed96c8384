"""`jaxshard train`: train a language model on text, sharded over a mesh."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.experts import count_experts
from jaxshard.commands.flags import (
    DataFlags,
    OutputFlags,
    PrecisionName,
    RecipeFlags,
    SavingFlags,
    ShardingFlags,
    check_files,
    check_folders,
    check_not_empty,
    check_positive,
    check_seed,
)
from jaxshard.commands.job import Job
from jaxshard.commands.low_rank import parse_factors
from jaxshard.commands.parallel import Parallel, make_parallel
from jaxshard.commands.pretrained import find_pretrained
from jaxshard.commands.program import depth_of, name_with_changes, parse_changes, size_of
from jaxshard.commands.replicas import make_copies
from jaxshard.commands.result import describe_step, draw_sample, summarize, why_no_sample, write_json
from jaxshard.commands.saving import check_export, describe_memory, make_saving
from jaxshard.commands.stops import Stops, ends_of_text
from jaxshard.commands.terminal import facts, make_console, progress, tables, working
from jaxshard.commands.training_data import load_data
from jaxshard.commands.wire import check_feedback
from jaxshard.core.compat import process_count_and_id
from jaxshard.data.batches import batches
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hard_exit import restore_sigterm
from jaxshard.distributed.preemption import Preemption
from jaxshard.distributed.watchdog import Watchdog
from jaxshard.hf.save import save
from jaxshard.models.recipe import Size
from jaxshard.training import metrics
from jaxshard.training.evaluate import evaluate, make_eval_step
from jaxshard.training.fit import PROFILE_SCHEMES, fit
from jaxshard.training.metrics.events import SCHEMES
from jaxshard.training.metrics.writer import finishing
from jaxshard.training.non_finite import BadSteps, Rollback
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState, init
from jaxshard.training.step import make_step


def run(
    *,
    model: str,
    change: str | None,
    data: DataFlags,
    sharding: ShardingFlags,
    remat: str | None,
    precision: PrecisionName | None,
    ordered: bool,
    recipe: RecipeFlags,
    saving: SavingFlags,
    output: OutputFlags,
) -> None:
    """Train a ready-made model, print how it goes, and write what was asked for; the arguments are the flags."""
    with usage_errors():
        initialize()
    restore_sigterm()  # until there is a run to save
    written = (output.json, output.log, output.tensorboard, output.profile)
    files = [Path(file) for file in written if file is not None]
    is_first = process_count_and_id()[1] == 0
    console = make_console(stderr=str(output.json) == "-", quiet=not is_first)
    if not is_first:  # of several processes one speaks and writes, and all compute
        output = OutputFlags(sample=output.sample, export=output.export)

    with usage_errors():
        check_positive(eval_every=recipe.eval_every, patience=recipe.patience, sample=output.sample or None)
        check_not_empty(wandb=output.wandb, mlflow=output.mlflow)
        check_seed(recipe.seed)
        check_files(json=output.json, log=output.log)
        check_folders(SCHEMES, tensorboard=output.tensorboard)
        check_folders(PROFILE_SCHEMES, profile=output.profile)
        saves = make_saving(saving, others=files)
        if recipe.bad_steps == "rollback" and recipe.lora is not None:
            raise ValueError("--bad-steps rollback: the frozen model of --lora is in no checkpoint; use skip or raise")
        if recipe.bad_steps == "rollback" and sharding.sync_every:
            raise ValueError(
                "--bad-steps rollback leaves out steps, also those after which --sync-every synchronises; use skip"
            )
        if recipe.bad_steps == "rollback" and saving.checkpoint is None:
            raise ValueError("--bad-steps rollback goes back to a saved run: add --checkpoint DIR")
        how = make_parallel(
            sharding,
            remat=remat,
            precision=precision,
            ordered=ordered,
            depth=depth_of(model, change),
            batch=recipe.batch,
        )
        size = size_of(model, change, recipe, how.rows_multiple)
        facts(console, how.shown)
        changes = parse_changes(change)
        if "vocab" in changes:
            raise ValueError(f"--change {change}: the vocabulary is that of the corpus; leave vocab out")
        job = _make_job(console, model, change, how, size, data, recipe)
        check_export(output.export, job.network)
        copies = make_copies(recipe.check_replicas, job.layout, saves)
        for change in saves.check_facts(job.sequence):
            console.print(f"note: {change}")
        saver = saves.checkpointer(job.layout, job.sequence)  # before it compiles: another training may save there
        memory = saves.memory(job.layout, job.sequence)
        run, notes = saves.recall(memory, job.sequence)
        for change in notes:
            console.print(f"note: {change}")
        recalled = run is not None
        start = None
        if run is None:
            frozen = recipe.lora is not None  # what is frozen is not in checkpoints
            start = job.base.load(job.layout) if job.base is not None and (frozen or saves.resumed is None) else None
            run = saves.restore_run(job.layout, start if frozen else None)
        check_feedback(how.engine, job.layout, run, saves.memory_every)
        begin = 0 if run is None else int(run.step)
        writers = _open_writers(output, job, saves.folder)
    facts(console, job.shown | saves.shown | describe_memory(memory, begin if recalled else None) | copies.shown)
    if output.sample and (why := why_no_sample(job.network, job.layout)):
        console.print(f"note: there is no sample at the end: {why}")
        output = replace(output, sample=0)

    with finishing(writers):
        started = time.perf_counter()
        step = make_step(job.network.loss, job.tx, job.layout, engine=how.engine)
        with working(console, "compiling"):
            with refusals():  # of names of activations, for example
                compiled = step.compile(job.rows)
            if run is None:
                run = init(job.network.init, job.tx, job.layout, job.seed, init_from=start)
            del start
            jax.block_until_ready(run)
        compile_seconds = time.perf_counter() - started
        eval_step = make_eval_step(job.network.evaluate, job.layout, engine=how.engine)
        steps = size.recipe.steps
        records: list[Record] = []
        with Preemption() as preemption:
            with progress(console, steps) as show, saver as checkpointer:
                policy = _bad_step_policy(recipe.bad_steps, checkpointer, run)
                with _watchdog() as watchdog:
                    after_step = (memory, checkpointer, preemption, watchdog)
                    run = fit(
                        run,
                        step,
                        batches(job.source, job.layout, start=run.step),
                        steps=steps,
                        evaluate=lambda run: evaluate(eval_step, run, job.held_out),
                        eval_every=recipe.eval_every or max(1, steps // 4),
                        patience=recipe.patience,
                        callbacks=[records.append, *writers, show],
                        on_run=[*copies.callbacks, *(one for one in after_step if one is not None)],
                        tokens=job.tokens,
                        flops=job.flops,
                        profile=output.profile,
                        bad_steps=policy,
                    )
                copies.check(run)
                if checkpointer is not None:
                    checkpointer.save(run)
            stopped = preemption.stopped and int(run.step) < steps
            result = job.about | {"start": begin, "stopped": stopped} | summarize(records)
            result |= {"compile_seconds": compile_seconds} | describe_step(compiled, job.layout, job.rows)
            last = (result["evaluations"] or [{}])[-1]
            result["experts"] = count_experts(
                job.network, run, job.layout, how.engine, [] if stopped else job.held_out, last.get("drop_rate")
            )
            # Where it was stopped, something else waits for this process to end.
            length = 0 if stopped else output.sample
            stops = Stops(ends_of_text(job.data.tokenizer, None if job.base is None else job.base.folder))
            result["sample"] = draw_sample(
                job.network, run, job.layout, job.data, length=length, stops=stops, seed=job.seed
            )
            if output.export is not None and not stopped:
                words = job.data.tokenizer
                save(output.export, run, job.layout, tokenizer=None if words is None else words.file)
            tables(console, result)
            write_json(output.json, result)
        if stopped:
            goes_on = "--resume goes on" if checkpointer else "nothing was saved, for want of --checkpoint"
            console.print(f"stopped by SIGTERM after step {int(run.step)} of {steps}; {goes_on}")


def _make_job(
    console: Console, model: str, change: str | None, how: Parallel, size: Size, data: DataFlags, recipe: RecipeFlags
) -> Job:
    """Load the tokens that the model reads, and make the job."""
    name, base = name_with_changes(model, change), find_pretrained(model, parse_changes(change))
    factors = None if recipe.lora is None else parse_factors(recipe.lora)
    if factors is not None and base is None:
        raise ValueError(f"--lora {recipe.lora}: there is nothing to freeze; give the weights, as --model hf:PATH")
    if factors is not None:
        name += f" --lora {recipe.lora}"
    return Job(name, how, size, load_data(console, data, base), recipe.seed, base, factors)


def _bad_step_policy(
    policy: Literal["raise", "skip", "rollback"], checkpointer: Checkpointer | None, run: TrainState
) -> BadSteps:
    """What `fit` does about a bad step; for a rollback there is a saved run to go back to from the first step on."""
    if policy != "rollback":
        return policy
    assert checkpointer is not None, "train refuses --bad-steps rollback without --checkpoint"
    if int(run.step) == 0:
        checkpointer.save(run)
    return Rollback(checkpointer.restore)


def _watchdog() -> AbstractContextManager[Watchdog | None]:
    """A watchdog where there are several processes, which may wait for each other in vain."""
    return Watchdog() if jax.process_count() > 1 else nullcontext()


def _open_writers(output: OutputFlags, job: Job, checkpoints: Path | None) -> list[metrics.Writer]:
    """Open what the numbers of steps are written to; a resumed run goes on in the runs whose ids lie beside it."""
    config = job.about | {"layout": job.layout}
    writers: list[metrics.Writer] = []
    if output.log is not None:
        writers.append(metrics.json_lines(output.log))
    if output.tensorboard is not None:
        writers.append(metrics.tensorboard(output.tensorboard, config=config))
    if output.wandb is not None:
        writers.append(metrics.wandb(output.wandb, config=config, folder=checkpoints))
    if output.mlflow is not None:
        writers.append(metrics.mlflow(output.mlflow, config=config, folder=checkpoints))
    return writers
