"""`jaxshard train`: a language model on text or tokens, sharded over a mesh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checks.collectives.found import collectives, summary
from jaxshard.commands.devices import describe
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Count, File, Words, check_files, check_positive, corpus_of, size_of
from jaxshard.commands.job import make_job
from jaxshard.commands.parallel import EngineName, RematName, StrategyName, parallel
from jaxshard.commands.program import depth_of
from jaxshard.commands.result import compiled_bytes, numbers, predicted_bytes, sampled, write_json
from jaxshard.commands.saving import saving
from jaxshard.commands.terminal import facts, make_console, progress, tables
from jaxshard.core.compat import process_count_and_id
from jaxshard.data.batches import batches
from jaxshard.distributed.cluster import initialize
from jaxshard.distributed.hard_exit import end_on_sigterm
from jaxshard.distributed.preemption import Preemption
from jaxshard.distributed.watchdog import Watchdog
from jaxshard.training import metrics
from jaxshard.training.evaluate import evaluate, make_eval_step
from jaxshard.training.fit import fit
from jaxshard.training.non_finite import BadSteps, Rollback
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState, init
from jaxshard.training.step import make_step


def train(
    *,
    model: Annotated[str, tyro.conf.arg(metavar="NAME")] = "gpt-1m",
    data: File = None,
    dtype: Words = None,
    vocab: Count = None,
    mesh: Words = None,
    strategy: StrategyName = "fsdp",
    engine: EngineName | None = None,
    schedule: Words = None,
    chunks: Count = None,
    devices: Count = None,
    steps: Count = None,
    batch: Count = None,
    seq: Count = None,
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    microbatches: Count = None,
    remat: RematName | None = None,
    ordered: bool = False,
    lr: Annotated[float | None, tyro.conf.arg(metavar="X", help_behavior_hint="")] = None,
    eval_every: Count = None,
    patience: Count = None,
    checkpoint: File = None,
    resume: bool = False,
    checkpoint_every: Count = None,
    keep: Count = None,
    fall_back: bool = False,
    bad_steps: Literal["raise", "skip", "rollback"] = "raise",
    sample: Annotated[int, tyro.conf.arg(metavar="N")] = 160,
    json: File = None,
    log: File = None,
    tensorboard: File = None,
    profile: File = None,
) -> None:
    """Train a language model, sharded over all accelerators, or over 8 simulated CPU devices.

    Without any flag: a million parameters, the source of Python's standard library, two minutes on two cores. Several
    processes (jaxshard launch, Slurm, Open MPI, Kubernetes, TPU pods) train together; devices, rows and steps are those
    of all.

    Args:
      model: a ready-made size: gpt-1m, gpt-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1m or llama3-8b.
      data: a text file, a folder of text, or token ids as .npy or .bin; without it Python's own library.
      dtype: of the token ids in a .bin file, such as uint16.
      vocab: how many token ids there are, for .npy and .bin.
      mesh: axes and sizes, such as data=8, replica=2,data=4 or data=2,tensor=2,pipe=2; one size may be -1. An axis
        tensor splits the layers themselves, an axis pipe puts them in stages.
      strategy: what is split over the axis data: ddp nothing, zero1 the optimizer state, zero2 gradients too, fsdp
        parameters too; hsdp is fsdp within each group of an axis replica.
      engine: explicit issues the collectives itself, auto leaves them to the compiler; with an axis pipe it is
        pipelined.
      schedule: of a pipeline: interleaved, zero_bubble, one_f_one_b, gpipe, or a table's .csv file.
      chunks: stages per device of a pipeline; by default two where the model has enough blocks.
      devices: use so many devices, over all processes; simulated ones where there is no accelerator.
      steps: optimizer steps in all; by default what suits the model.
      batch: rows of a step over all devices; by default what suits the model.
      seq: tokens in a row; by default what suits the model.
      seed: of the parameters and the order of the data.
      microbatches: compute a batch in so many turns and add their gradients; in a pipeline by default four per device.
      remat: what the forward pass of a block saves for the backward pass; by default everything, nothing in a
        pipeline.
      ordered: add over devices in one order, so that losses and parameters are the same bits for every number of
        processes that the devices are spread over.
      lr: the highest learning rate of AdamW; by default what suits the model.
      eval_every: steps between evaluations; by default four in all.
      patience: stop after so many evaluations without a lower held-out loss.
      checkpoint: save the run into this folder while it trains, and at the end; each step in a folder of its own.
      resume: go on from the newest step in --checkpoint; from step 0 where there is none.
      checkpoint_every: steps between saves; by default 10.
      keep: so many of the newest saves stay; by default all.
      fall_back: with --resume, go on from the newest step that is intact where newer ones are damaged.
      bad_steps: where loss or gradients are not finite, which changes nothing but the number of the step: raise ends
        the training, skip leaves the batch out, rollback goes back to the newest step in --checkpoint first.
      sample: how many tokens to draw from the model at the end; 0 for none.
      json: write the results as one JSON object; - is standard output, and then nothing else goes there.
      log: append the numbers of every step to this file, one JSON object a line.
      tensorboard: write them for TensorBoard into this folder; needs tensorboardX.
      profile: write a profile of three steps into this folder.
    """
    with usage_errors():
        initialize()
    end_on_sigterm()  # until there is a run to save
    first = process_count_and_id()[1] == 0
    console = make_console(stderr=str(json) == "-", quiet=not first)
    written = (json, log, tensorboard, profile)
    if not first:  # of several processes one speaks, and all compute
        json = log = tensorboard = profile = None
    with usage_errors():
        check_positive(eval_every=eval_every, patience=patience, microbatches=microbatches, sample=sample or None)
        check_files(json=json, log=log)
        saves = saving(
            checkpoint=checkpoint, resume=resume, fall_back=fall_back, checkpoint_every=checkpoint_every, keep=keep,
            others=written,
        )  # fmt: skip
        if bad_steps == "rollback" and checkpoint is None:
            raise ValueError("--bad-steps rollback goes back to a saved run: add --checkpoint DIR")
        how = parallel(
            mesh=mesh, strategy=strategy, engine=engine, devices=devices, microbatches=microbatches, remat=remat,
            schedule=schedule, chunks=chunks, depth=depth_of(model), batch=batch, ordered=ordered,
        )  # fmt: skip
        size = size_of(model, seq=seq, batch=batch, steps=steps, lr=lr, parts=how.parts)
        facts(console, {"devices": describe(list(how.mesh.devices.flat))} | how.shown)
        job = make_job(model, how, size, corpus_of(console, data, dtype, vocab), seed)
        for change in saves.checked(job.sequence):
            console.print(f"note: {change}")
        run = saves.restored(job.layout)
        writers = _writers(log, tensorboard)
    facts(console, job.shown | saves.shown)

    started = time.perf_counter()
    step = make_step(job.network.loss, job.tx, job.layout, engine=how.engine)
    with console.status("compiling"):
        compiled = step.compile(job.rows)
        run = jax.block_until_ready(init(job.network.init, job.tx, job.layout, seed) if run is None else run)
    compile_seconds = time.perf_counter() - started
    records: list[Record] = []
    eval_step = make_eval_step(job.network.evaluate, job.layout, engine=how.engine)
    with Preemption() as preemption:
        with progress(console, size.recipe.steps) as show, saves.checkpointers(job.layout, job.sequence) as keepers:
            policy = _policy(bad_steps, keepers, run)
            with _watchdogs() as watchdogs:
                run = fit(
                    run,
                    step,
                    batches(job.source, job.layout, start=run.step),
                    steps=size.recipe.steps,
                    evaluate=lambda run: evaluate(eval_step, run, job.held_out),
                    eval_every=eval_every or max(1, size.recipe.steps // 4),
                    patience=patience,
                    callbacks=[records.append, *writers, show],
                    on_run=[*keepers, preemption, *watchdogs],
                    tokens=job.tokens,
                    flops=job.flops,
                    profile=profile,
                    bad_steps=policy,
                )
            for keeper in keepers:
                keeper.save(run)
        stopped = preemption.stopped and int(run.step) < size.recipe.steps
        if stopped:  # and something else waits for this process to end
            sample = 0
        result = (
            job.about
            | {"start": saves.resumed or 0, "stopped": stopped}
            | numbers(records)
            | {
                "compile_seconds": compile_seconds,
                "bytes_per_device": {
                    "predicted": predicted_bytes(job.layout, job.rows),
                    "compiled": compiled_bytes(compiled),
                },
                "collectives": [row.as_dict() for row in summary(collectives(compiled, how.mesh))],
                "sample": sampled(job.network, run, job.layout, job.corpus, length=sample, seed=seed),
            }
        )
        tables(console, result)
        write_json(json, result)
    if stopped:
        goes_on = "--resume goes on" if keepers else "nothing was saved, for want of --checkpoint"
        console.print(f"stopped by SIGTERM after step {int(run.step)} of {size.recipe.steps}; {goes_on}")


def _policy(bad_steps: Literal["raise", "skip", "rollback"], keepers: list[Checkpointer], run: TrainState) -> BadSteps:
    """What `fit` does about a bad step."""
    if bad_steps != "rollback":
        return bad_steps
    (keeper,) = keepers
    if int(run.step) == 0:
        keeper.save(run)  # so that there is one to go back to from the first steps
    return Rollback(keeper.restore)


@contextlib.contextmanager
def _watchdogs() -> Iterator[list[Watchdog]]:
    """One where there are several processes, which may wait for each other."""
    if jax.process_count() == 1:
        yield []
        return
    with Watchdog() as watchdog:
        yield [watchdog]


def _writers(log: Path | None, tensorboard: Path | None) -> list[metrics.Writer]:
    writers = [] if log is None else [metrics.json_lines(log)]
    return writers if tensorboard is None else [*writers, metrics.tensorboard(tensorboard)]
