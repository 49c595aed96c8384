"""The flags of every command: the signatures that the command line is made from, with their help.

Each function hands its arguments to `run` in the file of the command's name. They stand here, and apart from what they
do, so that help and refusals do not wait for JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes

from jaxshard.commands.flags import (
    Change,
    Count,
    DataFlags,
    File,
    JsonFile,
    Number,
    OutputFlags,
    Precision,
    Rate,
    RecipeFlags,
    Remat,
    SavingFlags,
    Sharding,
    StrategyName,
    Target,
    Texts,
    Words,
)


def train(
    *,
    model: Annotated[str, tyro.conf.arg(metavar="NAME")] = "gpt-1m",
    change: Change = None,
    data: OmitArgPrefixes[DataFlags],
    sharding: Sharding,
    remat: Remat = None,
    precision: Precision = None,
    ordered: bool = False,
    recipe: OmitArgPrefixes[RecipeFlags],
    saving: OmitArgPrefixes[SavingFlags],
    output: OmitArgPrefixes[OutputFlags],
) -> None:
    """Train a language model over all accelerators, or over 8 simulated CPU devices.

    Without any flag: a million parameters, the source of Python's standard library, two minutes on two cores. Several
    processes (jaxshard launch, Slurm, Open MPI, Kubernetes, TPU pods) train together; devices, rows and steps are those
    of all.

    Args:
      model: a ready-made size: gpt-1m, gpt-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1m, llama2-7b,
        llama3-8b, llama3-70b, llama3-405b, moe-1m, mixtral-8x7b, qwen3-30b-a3b or deepseek-16b. hf:PATH goes on
        from the weights of a folder of Hugging Face's.
      ordered: add over devices in one order, so that losses and parameters are the same bits for every number of
        processes that the devices are spread over.
    """
    from jaxshard.commands.train import run

    run(
        model=model,
        change=change,
        data=data,
        sharding=sharding,
        remat=remat,
        precision=precision,
        ordered=ordered,
        recipe=recipe,
        saving=saving,
        output=output,
    )


def generate(
    *,
    model: Annotated[str, tyro.conf.arg(metavar="NAME")],
    change: Change = None,
    checkpoint: File = None,
    prompt: Texts = (),
    prompt_tokens: Texts = (),
    tokenizer: File = None,
    length: Count = None,
    temperature: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0,
    top_k: Count = None,
    top_p: Rate = None,
    stop: Texts = (),
    mesh: Words = None,
    strategy: StrategyName = "fsdp",
    devices: Count = None,
    seed: Number = 0,
    json: JsonFile = None,
) -> None:
    """Continue prompts with a model, sharded over a mesh.

    jaxshard generate --model hf:PATH --prompt "Once upon a time" --length 64 --mesh data=2,tensor=4

    Without an accelerator as many CPU devices are simulated as --mesh needs, or one. The JSON object has "tokens", one
    list for each prompt with the prompt in it and the token that ended it, and "text", which leaves out what ended it.

    Args:
      model: hf:PATH, a folder that transformers wrote, or a ready-made size such as llama-1m with --checkpoint.
      checkpoint: the folder in which jaxshard train saved a run of this model; its newest step is read.
      prompt: a text to continue; give it once for each.
      prompt_tokens: the tokens of a prompt, such as 1,5,9; give it once for each.
      tokenizer: a tokenizer.json, or a folder that has one; by default that of the model. Without one a model that was
        trained on text reads bytes.
      length: the largest number of new tokens; by default 64, or as many as the model has positions for.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from so many most likely tokens.
      top_p: draw from the fewest tokens whose probabilities add up to at least this.
      stop: end at this text, such as '</s>' or '\\n\\n', or at one of these tokens, such as 2 or 2,7; give it as often
        as you like. Every text also ends at the end of text that the tokenizer or the model's configuration names.
      mesh: axes and sizes, such as data=2,tensor=4.
      strategy: how weights rest over the axis data: fsdp splits them and gathers a block at a time, ddp keeps them
        whole.
      devices: use so many devices.
      seed: of what is drawn at random.
    """
    from jaxshard.commands.generate import run

    run(
        model=model,
        change=change,
        checkpoint=checkpoint,
        prompts=prompt,
        prompt_tokens=prompt_tokens,
        tokenizer_file=tokenizer,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        mesh=mesh,
        strategy=strategy,
        devices=devices,
        seed=seed,
        json=json,
    )


def launch(
    command: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="COMMAND ...", help_behavior_hint="")]
    ],
    *,
    processes: Annotated[int, tyro.conf.arg(aliases=("-n",), metavar="N")],
    max_restarts: Annotated[int, tyro.conf.arg(metavar="K")] = 0,
    grace: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 20.0,
) -> int:
    """Run a command as several processes of this machine that train together, after a double dash.

    jaxshard launch -n 2 --max-restarts 3 -- jaxshard train --checkpoint run --resume

    Every process finds the others by its environment, which js.distributed.initialize() reads; its lines are shown with
    its number in front. When one dies the others are ended, and all are started again, with the same command: it has to
    go on from a checkpoint by itself, or from memory (jaxshard train --memory-every 1). The exit status is that of the
    process that failed first (128 + n where signal n ended it), or 0 when all ended with 0. After status 2, for wrong
    flags, nothing is started again.

    Without accelerators jaxshard's own commands share eight simulated devices, or those of --devices. In a program of
    your own js.simulate_devices(n) gives each process n.

    Args:
      command: what every process runs, found on PATH.
      processes: how many there are.
      max_restarts: start all again up to so many times.
      grace: SIGTERM and Ctrl-C are passed on; what is still there so many seconds later is killed.
    """
    from jaxshard.commands.launch import run

    return run(command, processes=processes, max_restarts=max_restarts, grace=grace)


def audit(
    target: Target | None = None,
    /,
    *,
    hlo: File = None,
    change: Change = None,
    sharding: Sharding,
    batch: Count = None,
    seq: Count = None,
    remat: Remat = None,
    precision: Precision = None,
    topology: Words = None,
    all: bool = False,
    json: JsonFile = None,
) -> int:
    """Compile a training step and name every collective that the strategy does not promise; status 1 if there is one.

    Nothing is trained, and no array is made. Anyone's step is read from its text:

    jaxshard audit --hlo step.txt --mesh data=4,tensor=2 --strategy fsdp

    Args:
      hlo: in place of TARGET the text of a compiled step, as compiled.as_text() returns it or an XLA dump has it
        (*after_optimizations.txt). Name the axes of the mesh that it was compiled for, in their order, by what they
        are for. Unless you name a strategy too, collectives are only listed.
      batch: rows of a step over all devices, for a ready-made size; by default what suits it.
      seq: tokens in a row, for a ready-made size; by default what suits it.
      topology: compile for TPUs that are not here, such as v5e:2x4; needs libtpu.
      all: print every surprise, collective and instruction; by default surprises by line and kind, and the number of
        all else.
    """
    from jaxshard.commands.audit import run

    return run(
        target,
        hlo=hlo,
        change=change,
        sharding=sharding,
        batch=batch,
        seq=seq,
        remat=remat,
        precision=precision,
        topology=topology,
        all=all,
        json=json,
    )


def plan(
    target: Target,
    /,
    *,
    change: Change = None,
    sharding: Sharding,
    batch: Count = None,
    seq: Count = None,
    remat: Remat = None,
    precision: Precision = None,
    topology: Words = None,
    slices: Count = None,
    chip: Words = None,
    price: Rate = None,
    estimate: bool = False,
    codegen: bool = False,
    plot: File = None,
    json: JsonFile = None,
) -> None:
    """Predict the memory, communication and time of a training step on chips that are not here, and whether it fits.

    jaxshard plan llama3-8b --mesh data=256 --topology v5e:16x16 --precision bf16 --batch 256 --seq 8192

    Nothing is computed and no array is made. Where the compiler of the chips is installed (libtpu for TPUs) memory is
    what it assigns, and "judged_by" in the JSON object is "compiler"; otherwise memory is estimated. "fits" is true,
    false, or null where only the compiler knows; "live_bytes" are live at once, "allocated_bytes" must fit.

    Args:
      batch: rows of a step over all devices, for a ready-made size; by default what suits it.
      seq: tokens in a row, for a ready-made size; by default what suits it.
      topology: TPUs or GPUs that are not here: v5e:16x16, v5p:4x4x8, or h100:8x32 for 32 hosts of 8.
      slices: so many TPU slices, connected by the data center's network.
      chip: predict for the limits of this chip, such as v5e or h100; without --topology for the devices that are here.
      price: of one chip for an hour, in any currency, for the price of a billion tokens.
      estimate: estimate memory, without a compiler.
      codegen: compile to the end, which takes minutes: prints the compiler's verdict with estimated cycles too.
      plot: draw memory by role across strategies into a file such as plan.png or plan.svg, and the shards, the
        roofline and the schedule of a pipeline into plan-shards.png and so on; needs matplotlib.
    """
    from jaxshard.commands.plan import run

    run(
        target,
        change=change,
        sharding=sharding,
        batch=batch,
        seq=seq,
        remat=remat,
        precision=precision,
        topology=topology,
        slices=slices,
        chip=chip,
        price=price,
        estimate=estimate,
        codegen=codegen,
        plot=plot,
        json=json,
    )


def search(
    target: Target,
    /,
    *,
    topology: Annotated[str, tyro.conf.arg(metavar="TEXT")],
    slices: Count = None,
    change: Change = None,
    batch: Count = None,
    seq: Count = None,
    precision: Precision = None,
    price: Rate = None,
    compile: Count = None,
    json: JsonFile = None,
) -> None:
    """Find how to split a model over chips that are not here: layouts that fit, ranked by time, with reasons.

    jaxshard search llama3-8b --topology v5e:16x16 --batch 256 --seq 8192 --precision bf16

    In the JSON object "plans" has them, the best first, each with its mesh, strategy, seconds, bytes, reason, and
    "flags" with which jaxshard plan, audit and train do the same.

    Args:
      topology: TPUs or GPUs: v5e:16x16, v5p:4x4x8, or h100:8x32 for 32 hosts of 8.
      slices: so many TPU slices, connected by the data center's network.
      batch: rows of a step over all devices, for a ready-made size; by default what suits it.
      seq: tokens in a row, for a ready-made size; by default what suits it.
      price: of one chip for an hour, in any currency, for the price of a billion tokens.
      compile: ask the compiler about the best until so many fit, by default 3; 0 leaves that out.
    """
    from jaxshard.commands.search import run

    run(
        target,
        topology=topology,
        slices=slices,
        change=change,
        batch=batch,
        seq=seq,
        precision=precision,
        price=price,
        compile=compile,
        json=json,
    )


def parity(
    target: Target,
    /,
    *,
    change: Change = None,
    sharding: Sharding,
    batch: Count = None,
    seed: Number = 0,
    json: JsonFile = None,
) -> int:
    """Run one training step sharded and on one device, and compare all arrays; status 1 if one differs.

    Everything is computed in f32. Without an accelerator, 8 devices are simulated.

    Args:
      batch: rows of a step over all devices, for a ready-made size; by default about 16.
      seed: of the parameters, the tokens of a ready-made size, and what the loss draws.
    """
    from jaxshard.commands.parity import run

    return run(target, change=change, sharding=sharding, batch=batch, seed=seed, json=json)


def schedule(
    name: Annotated[str, tyro.conf.arg(metavar="NAME")],
    /,
    *,
    stages: Count = None,
    microbatches: Count = None,
    chunks: Count = None,
    plot: File = None,
    json: JsonFile = None,
) -> None:
    """Show a pipeline's schedule: the table, its idle time, and what every device stashes.

    A backward takes twice as long as a forward, half of it for the weights' gradients.

    Args:
      name: gpipe, one_f_one_b, interleaved or zero_bubble, or the path of a CSV file with the columns
        tick,device,op,chunk,microbatch.
      stages: devices of the pipeline; a file has its own.
      microbatches: parts of a batch; a file has its own.
      chunks: parts of the model on each device, for interleaved and zero_bubble; 2 by default.
      plot: draw the schedule into a file such as schedule.png or schedule.svg.
    """
    from jaxshard.commands.schedule import run

    run(name, stages=stages, microbatches=microbatches, chunks=chunks, plot=plot, json=json)


def checkpoint(
    action: Annotated[Literal["list", "show", "verify"], tyro.conf.arg(metavar="ACTION")],
    dir: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    /,
    *,
    step: Count = None,
    json: JsonFile = None,
) -> int:
    """List the steps in a folder of checkpoints, show what one holds, or verify every byte of all of them.

    The exit status is 1 where a file is missing or was added, and under verify where a byte of it is not as it was
    saved; its name is printed.

    Args:
      action: list, show or verify.
      dir: the folder that js.save or jaxshard train --checkpoint wrote.
      step: this step alone; show takes the newest one by default.
    """
    from jaxshard.commands.checkpoint import run

    return run(action, dir, step=step, json=json)


def doctor(*, json: JsonFile = None) -> int:
    """Say what is here, what is missing, and what does not work, each with its remedy; status 1 if something is broken.

    Devices, hosts with their memory, clocks and connections (under jaxshard launch, Slurm and the like of all
    processes), versions, the compile cache; bad settings, packages that do not fit together, and what holds the TPU.
    Extras that are absent are no failure.
    """
    from jaxshard.commands.doctor import run

    return run(json)
