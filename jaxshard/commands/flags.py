"""The flags of every command: a dataclass for each, made of groups of flags that several commands have.

A flag is a field. Its help is the line of the field under "Attributes", its type says what values are refused (see
`jaxshard.commands.values`). Nothing here imports JAX, so that help and refusals come at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxshard.commands.values import (
    Count,
    File,
    Kind,
    Natural,
    Rate,
    Real,
    Step,
    Text,
    Texts,
    Written,
    read_count,
    read_rate,
)
from jaxshard.core.local_path import local_path

StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
PrecisionName = Literal["bf16", "bfloat16"]

Folder = Annotated[str | None, Kind("PATH")]  # as text: a Path would drop one of the slashes of gs://


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of a command."""


@dataclass(frozen=True, kw_only=True)
class Result(Flags):
    """The result as a file.

    Attributes:
      json: write the result into this file as one JSON object; - is standard output
    """

    json: Written = None


@dataclass(frozen=True, kw_only=True)
class Config(Result):
    """The flags as a file.

    Attributes:
      config: read flags from this TOML file, by the same names; a flag on the command line wins
      save_config: write the flags into a TOML file that --config reads
    """

    config: File = None
    save_config: Written = None


@dataclass(frozen=True, kw_only=True)
class Sharding(Flags):
    """The mesh, the strategy and the engine.

    Attributes:
      mesh: axes and sizes: data=8 or data=2,tensor=2,pipe=2; also replica, context, expert; -1 is the rest
      strategy: ddp, zero1, zero2, fsdp (the default) or hsdp, which is fsdp within each group of an axis replica
      rule: what the axis tensor does to a logical axis: vocab=replicated, mlp=tensor; may be repeated
      sync_every: train each group of an axis replica on its own, and average parameters every N steps (DiLoCo)
      sync_warmup: average gradients over the groups in the first N steps, such as those of the warm-up
      outer: optimizer of --sync-every: average (the default), or rate=0.7,momentum=0.9 for Nesterov momentum
      engine: explicit (the default) issues the collectives, auto leaves them to the compiler; or pipelined
      schedule: of a pipeline: interleaved, zero_bubble, one_f_one_b, gpipe, or a table's .csv file
      chunks: stages per device of a pipeline; by default 2 for a ready-made size with enough blocks, else 1
      context: attention over an axis context: gather, ulysses, usp (over a second axis, context_heads) or ring
      devices: use so many devices, over all processes; simulated ones where there is no accelerator
      microbatches: accumulate gradients over so many micro-batches; in a pipeline by default four per device
      wire: send gradients or weights in 8 bits: gradients=int8,weights=fp8,block=128,feedback=on
    """

    mesh: Text = None
    strategy: StrategyName | None = None
    rule: Texts = ()
    sync_every: Count = None
    sync_warmup: Count = None
    outer: Text = None
    engine: Literal["explicit", "auto", "pipelined"] | None = None
    schedule: Text = None
    chunks: Count = None
    context: Literal["gather", "ulysses", "usp", "ring"] | None = None
    devices: Count = None
    microbatches: Count = None
    wire: Text = None


@dataclass(frozen=True, kw_only=True)
class Model(Flags):
    """The model and its batches.

    Attributes:
      change: arguments of the model, js.models.gpt, llama or moe: depth=4,rope_scaling=8
    """

    change: Text = None


@dataclass(frozen=True, kw_only=True)
class Rows(Model):
    """The model and its batches.

    Attributes:
      batch: rows of a step over all devices; by default the model's
      seq: tokens in a row; by default the model's
      precision: bf16 (or bfloat16): compute, gather weights and reduce gradients in it; by default all is f32
    """

    batch: Count = None
    seq: Count = None
    precision: PrecisionName | None = None


@dataclass(frozen=True, kw_only=True)
class Compute(Rows, Sharding):
    """The model and its batches.

    Attributes:
      remat: activations to save: everything, dots, nothing, or by name: attention_out=save,block_in=offload
    """

    remat: Text = None


@dataclass(frozen=True, kw_only=True)
class Targeted(Flags):
    """The step.

    Attributes:
      target: a ready-made size such as gpt-1m, hf:PATH with new weights, or path/to/file.py:function or
        package.module:function, which returns (init_fn, loss_fn, tx, batch)
    """

    target: Annotated[str, Kind("TARGET", is_positional=True)]


@dataclass(frozen=True, kw_only=True)
class Data(Flags):
    """The corpus to train on.

    Attributes:
      data: text, token ids as .npy or .bin, or records as .jsonl; by default the source of Python's library
      dtype: of the token ids in a .bin file, such as uint16
      vocab: how many token ids there are, for .npy and .bin
      tokenizer: a tokenizer.json, or a folder that has one; by default the tokenizer of the model hf:PATH
      template: a line for each message in .jsonl, such as '{role}:\\n{content}\\n', not the tokenizer's chat template
    """

    data: Folder = None  # text, not a Path: that of an empty text is the current folder
    dtype: Text = None
    vocab: Count = None
    tokenizer: Text = None
    template: Text = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Flags):
    """Steps, optimizer and learning rate.

    Attributes:
      steps: optimizer steps in all; by default the model's
      optimizer: a function of optax or js.optim with arguments, such as lion,b2=0.98; by default adamw
      lr: the highest learning rate; by default the model's
      warmup: steps of a linear warm-up; by default the model's
      decay: of the learning rate after the warm-up: cosine (the default), linear, or constant
      clip: clip gradients to this global norm; by default the model's
      seed: of the parameters and the order of the data
      eval_every: steps between evaluations; by default four in all
      patience: stop after so many evaluations without a lower held-out loss
      lora: freeze hf:PATH and train low-rank factors: rank=8,alpha=16,base=int8,match=q_proj/kernel
      bad_steps: raise, skip or rollback (to the newest saved step) where a step is not finite
      check_replicas: compare the copies of all arrays over devices, bit by bit, every N steps; by default never
    """

    steps: Count = None
    optimizer: Text = None
    lr: Rate = None
    warmup: Step = None
    decay: Literal["cosine", "linear", "constant"] | None = None
    clip: Rate = None
    seed: Natural = 0
    eval_every: Count = None
    patience: Count = None
    lora: Text = None
    bad_steps: Literal["raise", "skip", "rollback"] = "raise"
    check_replicas: Count = None


@dataclass(frozen=True, kw_only=True)
class Saving(Flags):
    """The checkpoints.

    Attributes:
      checkpoint: save the run into this folder while it trains, and at the end
      resume: go on from the newest step in --checkpoint, if there is one
      checkpoint_every: steps between saves; by default 10
      keep: so many of the newest saves stay; by default all
      fall_back: with --resume, go on from the newest step that is intact where newer ones are damaged
      memory_every: steps between copies into memory, for restarts by jaxshard launch --max-restarts
    """

    checkpoint: File = None
    resume: bool = False
    checkpoint_every: Count = None
    keep: Count = None
    fall_back: bool = False
    memory_every: Count = None


@dataclass(frozen=True, kw_only=True)
class Output(Flags):
    """The outputs.

    Attributes:
      sample: how many tokens to draw from the model at the end; 0 for none
      export: write the trained model into this folder at the end, as transformers reads it
      log: append the numbers of every step to this file, one JSON object a line
      tensorboard: write them for TensorBoard into this folder, or at an address gs:// or s3://
      wandb: write them into a run of this project of Weights & Biases; --resume goes on in it
      mlflow: write them into a run of this experiment of MLflow, at MLFLOW_TRACKING_URI
      profile: write a profile of three steps into this folder, or at an address gs://
    """

    sample: Natural = 160
    export: File = None
    log: Written = None
    tensorboard: Folder = None
    wandb: Annotated[str | None, Kind("PROJECT")] = None
    mlflow: Annotated[str | None, Kind("EXPERIMENT")] = None
    profile: Folder = None


@dataclass(frozen=True, kw_only=True)
class Chips(Flags):
    """The chips.

    Attributes:
      topology: absent chips: v5e:16x16, v5p:4x4x8, or h100:8x32 for 32 hosts of 8
      slices: so many TPU slices, connected by the data center's network
      price: of one chip for an hour, for the price of a billion tokens
    """

    topology: Text = None
    slices: Count = None
    price: Rate = None


@dataclass(frozen=True, kw_only=True)
class Train(Compute, Data, Recipe, Saving, Output, Config):
    """Train a language model, sharded over a mesh.

    It takes all accelerators; without any it simulates the CPU devices that --mesh has, or 8. Without any flag: a
    million parameters, the source of Python's standard library, two minutes on two cores. Several processes (jaxshard
    launch, Slurm, Open MPI, Kubernetes, TPU pods) train together; devices, rows and steps are counted over all.

    Attributes:
      model: a ready-made size: gpt-1m, gpt-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1m, llama2-7b,
        llama3-8b, llama3-70b, llama3-405b, moe-1m, mixtral-8x7b, qwen3-30b-a3b or deepseek-16b. hf:PATH goes on from
        the weights of a folder of Hugging Face's.
      ordered: add over devices in one order: the same bits for every number of processes
    """

    model: Annotated[str, Kind("NAME")] = "gpt-1m"
    ordered: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate(Model, Config):
    """Continue prompts with a model, sharded over a mesh.

    jaxshard generate --model hf:PATH --prompt "Once upon a time" --length 64 --mesh data=2,tensor=4

    Without an accelerator as many CPU devices are simulated as --mesh has, or one. The JSON object has "tokens", one
    list for each prompt with the prompt in it and the token that ended it, and "text", which leaves out what ended it,
    and of --chat has the answer alone.

    Attributes:
      model: hf:PATH, a folder that transformers wrote, or a ready-made size with --checkpoint
      checkpoint: a folder where jaxshard train saved a run of this model; its newest step is read
      prompt: a text to continue; give it once for each.
      prompt_tokens: the tokens of a prompt, such as 1,5,9; give it once for each.
      chat: a message that the model answers, written by its chat template; give it once for each conversation
      system: the message of the system before each --chat
      tokenizer: a tokenizer.json, or a folder that has one; by default the model's, or bytes
      length: the largest number of new tokens; by default 64, or fewer if the model has no more positions
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from so many most likely tokens.
      top_p: draw from the fewest tokens whose probabilities add up to at least this
      stop: end at this text, such as '</s>' or '\\n\\n', or at these tokens, such as 2,7; as often as you like
      mesh: axes and sizes, such as data=2,tensor=4.
      strategy: fsdp shards weights over the axis data and gathers a block at a time, ddp replicates them
      devices: use so many devices.
      seed: of the random draws.
    """

    model: Annotated[str, Kind("NAME")]
    checkpoint: File = None
    prompt: Texts = ()
    prompt_tokens: Texts = ()
    chat: Texts = ()
    system: Text = None
    tokenizer: File = None
    length: Count = None
    temperature: Real = 0.0
    top_k: Count = None
    top_p: Rate = None
    stop: Texts = ()
    mesh: Text = None
    strategy: StrategyName = "fsdp"
    devices: Count = None
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Launch(Flags):
    """Run a command in several processes on this machine.

    jaxshard launch -n 2 --max-restarts 3 -- jaxshard train --checkpoint run --resume

    Every process finds the others by its environment, which js.distributed.initialize() reads; its lines are shown with
    its number in front. When one dies the others are ended, and all are started again, with the same command: it has to
    go on from a checkpoint by itself, or from memory (jaxshard train --memory-every 1). The exit status is that of the
    process that failed first (128 + n where signal n ended it), or 0 when all ended with 0. After status 2, for wrong
    flags, nothing is started again.

    Without accelerators jaxshard's own commands share eight simulated devices, or as many as --devices says. In a
    program of your own js.simulate_devices(n) gives each process n.

    Attributes:
      command: the command of every process, found on PATH
      processes: how many there are
      max_restarts: start all again up to so many times
      grace: seconds from SIGTERM or Ctrl-C, which are passed on, to SIGKILL
    """

    command: Annotated[tuple[str, ...], Kind("COMMAND ...", is_positional=True)] = ()
    processes: Annotated[int, Kind("N", read_count, alias="-n")]
    max_restarts: Natural = 0
    grace: Annotated[float, Kind("SECONDS", read_rate)] = 20.0


@dataclass(frozen=True, kw_only=True)
class Audit(Targeted, Compute, Config):
    """Compare the collectives of a compiled step with the promises of the strategy.

    Every collective that is not promised is named; status 1 if there is one. Nothing is trained, and no array is made.
    Anyone's step is read from its text: name the axes of its mesh, in their order, by their purpose. Without --strategy
    collectives are only listed.

    jaxshard audit --hlo step.txt --mesh data=4,tensor=2 --strategy fsdp

    Attributes:
      hlo: instead of TARGET the text of a compiled step, from as_text() or an XLA dump; needs --mesh
      topology: compile for absent TPUs, such as v5e:2x4; needs libtpu
      all: print every surprise, collective and instruction; by default a summary
    """

    target: Annotated[str, Kind("TARGET", is_positional=True)] = ""
    hlo: File = None
    topology: Text = None
    all: bool = False


@dataclass(frozen=True, kw_only=True)
class Parity(Targeted, Model, Sharding, Config):
    """Compare a sharded step with the same step on one device.

    It runs both and compares all arrays, in f32; status 1 if one differs. Without an accelerator, 8 devices are
    simulated.

    Attributes:
      batch: rows of a step over all devices; by default about 16
      seed: of the parameters, the tokens, and the random draws of the loss
    """

    batch: Count = None
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Plan(Targeted, Compute, Chips, Config):
    """Predict memory, communication and time of a step on absent chips, and whether it fits.

    jaxshard plan llama3-8b --mesh data=256 --topology v5e:16x16 --precision bf16 --batch 256 --seq 8192

    Nothing is computed and no array is made. If the compiler of the chips is installed (libtpu for TPUs), it assigns
    the memory, and "judged_by" in the JSON object is "compiler"; otherwise memory is estimated. "fits" is true, false,
    or null if only the compiler knows; "live_bytes" are live at once, "allocated_bytes" must fit.

    Attributes:
      chip: predict for the limits of this chip, such as v5e or h100; without --topology for the devices here
      estimate: estimate memory, without a compiler.
      codegen: compile to the end, which takes minutes, and print the compiler's verdict with estimated cycles
      plot: draw memory by role into this file, and more pictures next to it; needs matplotlib
    """

    chip: Text = None
    estimate: bool = False
    codegen: bool = False
    plot: Written = None


@dataclass(frozen=True, kw_only=True)
class Search(Targeted, Rows, Chips, Config):
    """Rank the layouts of a model on absent chips, with reasons.

    jaxshard search llama3-8b --topology v5e:16x16 --batch 256 --seq 8192 --precision bf16

    In the JSON object "plans" has them, the best first, each with its mesh, strategy, seconds, bytes, reason, and
    "flags" for jaxshard plan, audit and train.

    Attributes:
      compile: ask the compiler about the best until so many fit; 0 for none
    """

    topology: Annotated[str, Kind("TEXT")]
    compile: Natural = 3


@dataclass(frozen=True, kw_only=True)
class Schedule(Result):
    """Print a pipeline schedule with its idle time and its memory.

    A backward takes twice as long as a forward, half of it for the weights' gradients.

    Attributes:
      name: gpipe, one_f_one_b, interleaved, zero_bubble, or a CSV file of tick,device,op,chunk,microbatch
      stages: devices of the pipeline; a file has its own.
      microbatches: parts of a batch; a file has its own.
      chunks: parts of the model on each device, for interleaved and zero_bubble; by default 2
      plot: draw the schedule into a file such as schedule.png or schedule.svg
    """

    name: Annotated[str, Kind("NAME", is_positional=True)]
    stages: Count = None
    microbatches: Count = None
    chunks: Count = None
    plot: Written = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Result):
    """List, show or verify saved steps.

    The exit status is 1 where a file is missing or was added, and under verify where a byte of it is not as it was
    saved; its name is printed.

    Attributes:
      action: list the steps in a folder, show what one holds, or verify every byte of all of them
      dir: the folder that js.save or jaxshard train --checkpoint wrote.
      step: this step alone; show takes the newest one by default.
    """

    action: Annotated[Literal["list", "show", "verify"], Kind("ACTION", is_positional=True)]
    dir: Annotated[Path, Kind("DIR", local_path, is_positional=True)]
    step: Step = None


@dataclass(frozen=True, kw_only=True)
class Doctor(Result):
    """Print devices, versions and problems with their remedies.

    Devices, hosts with their memory, clocks and connections (under jaxshard launch, Slurm and the like of all
    processes), versions, the compile cache; bad settings, packages that do not fit together, and what holds the TPU.
    Status 1 if something is broken; extras that are absent are no failure.
    """


_ALL: tuple[type[Flags], ...] = (
    Train, Generate, Launch, Audit, Parity, Plan, Search, Schedule, Checkpoint, Doctor
)  # fmt: skip
COMMANDS = {command.__name__.lower(): command for command in _ALL}
"""The flags of each command by its name."""
