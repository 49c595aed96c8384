"""`jaxshard train`: a language model on text or tokens, sharded over a mesh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from jaxshard import metrics
from jaxshard._bad import BadSteps, Rollback
from jaxshard._compat import joined
from jaxshard._eval import evaluate, make_eval_step
from jaxshard._fit import Record, fit
from jaxshard._layout import human_bytes
from jaxshard._layout import layout as make_layout
from jaxshard._state import init
from jaxshard._train import check_batch, make_step
from jaxshard.commands.devices import describe
from jaxshard.commands.doctor import versions
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Count, File, Words, check_files, check_positive, corpus_of, size_of
from jaxshard.commands.parallel import EngineName, RematName, StrategyName, parallel
from jaxshard.commands.program import depth_of
from jaxshard.commands.result import compiled_bytes, corpus_facts, numbers, predicted_bytes, sampled, write_json
from jaxshard.commands.saving import saving
from jaxshard.commands.terminal import facts, make_console, progress, tables
from jaxshard.data import Corpus, batches, eval_batches, windows
from jaxshard.distributed import Preemption, Watchdog, initialize
from jaxshard.distributed.leaving import end_on_sigterm
from jaxshard.models.decoder import Size
from jaxshard.plan.audit import collectives, summary
from jaxshard.plan.flops import train_flops

EVAL_TOKENS = 2**16
"""How many held-out tokens an evaluation sees, evenly spaced over them."""


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
    first = joined()[1] == 0
    console = make_console(stderr=str(json) == "-", quiet=not first)
    if not first:  # of several processes one speaks, and all compute
        json = log = tensorboard = profile = None
    with usage_errors():
        check_positive(eval_every=eval_every, patience=patience, microbatches=microbatches, sample=sample or None)
        check_files(json=json, log=log)
        saves = saving(
            checkpoint=checkpoint, resume=resume, fall_back=fall_back, checkpoint_every=checkpoint_every, keep=keep
        )
        if bad_steps == "rollback" and checkpoint is None:
            raise ValueError("--bad-steps rollback goes back to a saved run: add --checkpoint DIR")
        how = parallel(
            mesh=mesh, strategy=strategy, engine=engine, devices=devices, microbatches=microbatches, remat=remat,
            schedule=schedule, chunks=chunks, depth=depth_of(model), batch=batch, ordered=ordered,
        )  # fmt: skip
        the_mesh, turns = how.mesh, how.engine.microbatches
        size = size_of(model, seq=seq, batch=batch, steps=steps, lr=lr, parts=how.parts)
        recipe = size.recipe
        facts(console, {"devices": describe(list(the_mesh.devices.flat))} | how.shown)
        corpus = corpus_of(console, data, dtype, vocab)
        shape = size.shape | {"vocab": corpus.vocab}
        network = size.model(vocab=corpus.vocab)
        tx = recipe.optimizer()
        layout = make_layout(how.strategy, the_mesh, network.init, tx)
        source = windows(corpus.train, batch=recipe.batch, seq=shape["seq"], seed=seed, vocab=corpus.vocab)
        held_out = _held_out(corpus, 4 * recipe.batch // turns, shape["seq"])
        rows = jax.eval_shape(lambda: source.rows(0, np.arange(recipe.batch)))
        check_batch(layout, rows, turns)
        described = _described(model, size, corpus, seed)
        for change in saves.checked(described):
            console.print(f"note: {change}")
        run = saves.restored(layout)
        writers = _writers(log, tensorboard)
    about = {
        "model": model,
        "params": sum(x.size for x in jax.tree.leaves(layout.shapes.params)),
        "devices": the_mesh.size,
        "device_kind": the_mesh.devices.flat[0].device_kind,
        "mesh": dict(the_mesh.shape),
        **how.about,
        "seed": seed,
        "size": shape,
        "recipe": recipe._asdict(),
        "corpus": corpus_facts(corpus),
        "versions": versions(),
        "start": saves.resumed or 0,
    }
    predicted = predicted_bytes(layout, rows)
    facts(console, _planned(about, predicted) | saves.shown)

    started = time.perf_counter()
    step = make_step(network.loss, tx, layout, engine=how.engine)
    with console.status("compiling"):
        compiled = step.compile(rows)
        run = jax.block_until_ready(init(network.init, tx, layout, seed) if run is None else run)
    compile_seconds = time.perf_counter() - started
    records: list[Record] = []
    eval_step = make_eval_step(network.evaluate, layout, engine=how.engine)
    with (
        progress(console, recipe.steps) as show,
        saves.checkpointers(layout, described) as keepers,
        Preemption() as preemption,
    ):
        with _watchdogs() as watchdogs:
            policy: BadSteps = "raise" if bad_steps == "rollback" else bad_steps
            if bad_steps == "rollback":
                if saves.resumed is None:
                    keepers[0].save(run)  # so that there is one to go back to from the first steps
                policy = Rollback(keepers[0].restore)
            run = fit(
                run,
                step,
                batches(source, layout, start=run.step),
                steps=recipe.steps,
                evaluate=lambda run: evaluate(eval_step, run, held_out),
                eval_every=eval_every or max(1, recipe.steps // 4),
                patience=patience,
                callbacks=[records.append, *writers, show],
                on_run=[*keepers, preemption, *watchdogs],
                tokens=recipe.batch * shape["seq"],
                flops=train_flops(network.loss, layout.shapes.params, rows, layout.shapes.key),
                profile=profile,
                bad_steps=policy,
            )
        for keeper in keepers:
            keeper.save(run)
    if preemption.stopped and int(run.step) < recipe.steps:
        goes_on = "--resume goes on" if keepers else "nothing was saved, for want of --checkpoint"
        console.print(f"stopped by SIGTERM after step {int(run.step)} of {recipe.steps}; {goes_on}")
        return
    result = (
        about
        | numbers(records)
        | {
            "compile_seconds": compile_seconds,
            "bytes_per_device": {"predicted": predicted, "compiled": compiled_bytes(compiled)},
            "collectives": [row.as_dict() for row in summary(collectives(compiled, the_mesh))],
            "sample": sampled(network, run, layout, corpus, length=sample, seed=seed),
        }
    )
    tables(console, result)
    write_json(json, result)


@contextlib.contextmanager
def _watchdogs() -> Iterator[list[Watchdog]]:
    """One where there are several processes, which may wait for each other."""
    if jax.process_count() == 1:
        yield []
        return
    with Watchdog() as watchdog:
        yield [watchdog]


def _described(model: str, size: Size, corpus: Corpus, seed: int) -> dict[str, Any]:
    """What decides the run's batches and learning rates, to go on with the same ones."""
    batch, steps, rate = size.recipe[:3]
    corpus_id = f"{corpus.name} ({corpus.digest})"
    shape = size.shape["seq"]
    return {"model": model, "batch": batch, "seq": shape, "seed": seed, "corpus": corpus_id, "steps": steps, "lr": rate}


def _held_out(corpus: Corpus, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
    """About `EVAL_TOKENS` held-out tokens in batches, whole ones where there are enough."""
    count = EVAL_TOKENS // seq
    limit = max(batch, count - count % batch)
    return list(eval_batches(corpus.held_out, batch=batch, seq=seq, limit=limit, vocab=corpus.vocab))


def _writers(log: Path | None, tensorboard: Path | None) -> list[metrics.Writer]:
    writers = [] if log is None else [metrics.json_lines(log)]
    return writers if tensorboard is None else [*writers, metrics.tensorboard(tensorboard)]


def _planned(about: dict[str, Any], predicted: dict[str, int]) -> dict[str, str]:
    size, recipe, corpus = about["size"], about["recipe"], about["corpus"]
    unit = f"{corpus['unit']}s"
    parts = {"param": "params", "grad": "grads", "opt": "optimizer"}
    return {
        "model": f"{about['model']}: {about['params']:,} parameters (width {size['width']}, {size['depth']} blocks)",
        "data": f"{corpus['name']}: {corpus['train_tokens']:,} {unit}, {corpus['held_out_tokens']:,} held out",
        "steps": f"{recipe['steps']:,} of {recipe['batch']} x {size['seq']} {unit}",
        "per device": ", ".join(f"{name} {human_bytes(predicted[role])}" for role, name in parts.items())
        + " (predicted)",
    }
