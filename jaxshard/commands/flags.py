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
    Picture,
    Place,
    Rate,
    Real,
    Size,
    Step,
    Text,
    Texts,
    Written,
    read_count,
    read_rate,
)
from jaxshard.core.local_path import local_path
from jaxshard.storage.paths import AnyPath, as_path

StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
PrecisionName = Literal["bf16", "bfloat16"]

Folder = Annotated[str | None, Kind("PATH")]  # as text: a Path would drop one of the slashes of gs://


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The base class of all dataclasses of flags: a field is a flag of a command."""


@dataclass(frozen=True, kw_only=True)
class Result(Flags):
    """The result as a JSON file.

    Attributes:
      json: write the result into this file, or at s3:// or gs://, as one JSON object; - is standard output
    """

    json: Written = None


@dataclass(frozen=True, kw_only=True)
class Config(Result):
    """The flags as a TOML file.

    Attributes:
      config: read flags from this TOML file, by the same names; a flag on the command line overrides its entry
      save_config: write the flags into a TOML file that --config reads
    """

    config: Place = None
    save_config: Written = None


@dataclass(frozen=True, kw_only=True)
class Sharding(Flags):
    """The mesh, the strategy and the engine.

    Attributes:
      mesh: axes and sizes: data=8 or data=2,tensor=2,pipe=2; also replica, context, expert; -1: all other devices
      strategy: ddp, zero1, zero2, fsdp (the default) or hsdp, which is fsdp within each group of an axis replica
      rule: shard a logical axis of parameters over tensor, or replicate it: mlp=tensor, vocab=replicated; repeatable
      sync_every: train each group of the axis replica on its own, and average parameters every N steps (DiLoCo)
      sync_warmup: with --sync-every, average gradients over the groups in each of the first N steps
      outer: outer optimizer of --sync-every: average (the default), or rate=0.7,momentum=0.9 (Nesterov momentum)
      engine: explicit (the default) issues collectives, auto leaves them to the compiler, pipelined needs an axis pipe
      schedule: pipeline schedule: interleaved, zero_bubble, one_f_one_b, gpipe, or a .csv file with a table
      chunks: pipeline stages per device; by default 2 for a ready-made size with enough blocks, else 1
      context: attention over the axis context: gather, ulysses, ring, or usp, which needs a second axis context_heads
      devices: number of devices to use, over all processes; CPU devices are simulated without an accelerator
      microbatches: number of micro-batches, whose gradients are added up; in a pipeline by default four per device
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
    devices: Size = None
    microbatches: Size = None
    wire: Text = None


@dataclass(frozen=True, kw_only=True)
class Model(Flags):
    """The model and its batches.

    Attributes:
      change: replace arguments of the model (js.models.gpt, llama or moe): depth=4,rope_scaling=8
    """

    change: Text = None


@dataclass(frozen=True, kw_only=True)
class Rows(Model):
    """The model and its batches.

    Attributes:
      batch: rows of a step over all devices; by default as the model recommends
      seq: tokens in a row; by default as the model recommends
      precision: bf16 (or bfloat16) computes, gathers weights and reduces gradients in bf16; by default in f32
      lora: freeze the model and train low-rank factors: rank=8,alpha=16,match=q_proj/kernel, and
        base=bf16 or base=int8 to store the frozen matrices in less than f32; train needs the weights of hf:PATH
    """

    batch: Size = None
    seq: Size = None
    precision: PrecisionName | None = None
    lora: Text = None


@dataclass(frozen=True, kw_only=True)
class Compute(Rows, Sharding):
    """The model and its batches.

    Attributes:
      remat: activations to keep for the backward pass: everything, dots, nothing, or named: attention_out=save
    """

    remat: Text = None


@dataclass(frozen=True, kw_only=True)
class Targeted(Flags):
    """The training step to look at.

    Attributes:
      target: a ready-made size such as gpt-1m, hf:PATH with new weights, or path/to/file.py:function or
        package.module:function, which returns (init_fn, loss_fn, tx, batch)
    """

    target: Annotated[str, Kind("TARGET", is_positional=True)]


@dataclass(frozen=True, kw_only=True)
class Data(Flags):
    """The corpus to train on.

    Attributes:
      data: text, token ids as .npy or .bin, or records as .jsonl, also at s3:// or gs://; by default the source of
        Python's library
      dtype: dtype of the token ids in a .bin file, such as uint16
      vocab: size of the vocabulary, for token ids in a .npy or .bin file
      tokenizer: a tokenizer.json, or a folder that has one; by default the tokenizer of the model hf:PATH
      template: a line for each message in .jsonl, such as '{role}:\\n{content}\\n', not the tokenizer's chat template
    """

    data: Folder = None  # text, not a Path: that of an empty text is the current folder
    dtype: Text = None
    vocab: Size = None
    tokenizer: Text = None
    template: Text = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Flags):
    """Steps, optimizer and learning rate.

    Attributes:
      steps: number of optimizer steps in all; by default as the model recommends
      optimizer: a function of optax or js.optim with arguments, such as lion,b2=0.98; by default adamw
      lr: highest learning rate; by default as the model recommends
      warmup: number of steps in which the learning rate rises linearly; by default as the model recommends
      decay: decay of the learning rate after the warm-up: cosine (the default), linear, or constant
      clip: clip gradients to this global norm; by default as the model recommends
      seed: seed of the initial parameters and of the order of the data
      eval_every: steps between evaluations on held-out data; by default there are four evaluations in all
      patience: stop after so many evaluations without a lower held-out loss
      bad_steps: if loss or gradients are not finite: raise an error, skip the step, or rollback to the last saved step
      check_replicas: compare the copies of replicated arrays, bit by bit, every N steps; by default never
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
    bad_steps: Literal["raise", "skip", "rollback"] = "raise"
    check_replicas: Count = None


@dataclass(frozen=True, kw_only=True)
class Saving(Flags):
    """The checkpoints to save and to resume.

    Attributes:
      checkpoint: save the run into this folder, or at s3:// or gs://, while it trains and at the end
      resume: go on from the newest step in the folder of --checkpoint, if there is one
      checkpoint_every: steps between saves; by default 10
      keep: number of newest saved steps to keep; by default all
      fall_back: with --resume, go on from the newest undamaged step if newer steps are damaged
      memory_every: steps between copies of the run in memory, for restarts by jaxshard launch --max-restarts
    """

    checkpoint: Place = None
    resume: bool = False
    checkpoint_every: Count = None
    keep: Count = None
    fall_back: bool = False
    memory_every: Count = None


@dataclass(frozen=True, kw_only=True)
class Output(Flags):
    """The outputs of a training run.

    Attributes:
      sample: number of tokens that the trained model generates at the end, at temperature 0.8; 0 for no sample
      export: write the trained model into this folder, or at s3:// or gs://, at the end, in the format of Hugging
        Face transformers
      log: append the metrics of every step to this file, one JSON object per line; at s3:// or gs:// to numbered
        objects, every 30 seconds
      tensorboard: write the metrics for TensorBoard into this folder, or at an address gs:// or s3://
      wandb: write the metrics to a run of this Weights & Biases project; with --resume to the same run
      mlflow: write the metrics to a run of this MLflow experiment, at MLFLOW_TRACKING_URI
      profile: write a trace of three steps, for jaxshard profile, into this folder, or at an address gs://
    """

    sample: Natural = 160
    export: Place = None
    log: Written = None
    tensorboard: Folder = None
    wandb: Annotated[str | None, Kind("PROJECT")] = None
    mlflow: Annotated[str | None, Kind("EXPERIMENT")] = None
    profile: Folder = None


@dataclass(frozen=True, kw_only=True)
class Chips(Flags):
    """The chips to plan for.

    Attributes:
      topology: chips that need not be attached: v5e:16x16, v5p:4x4x8, or h100:8x32 for 32 hosts of 8 GPUs
      slices: number of TPU slices, connected by the data center's network
      price: price of one chip for an hour, from which the price of a billion tokens is computed
    """

    topology: Text = None
    slices: Size = None
    price: Rate = None


@dataclass(frozen=True, kw_only=True)
class Train(Compute, Data, Recipe, Saving, Output, Config):
    """Train a language model, sharded over a mesh.

    It uses all accelerators; without an accelerator it simulates CPU devices, as many as --mesh needs, or 8. Without
    flags it trains a million parameters on the source of Python's standard library, in two minutes on two cores.
    Several processes (jaxshard launch, Slurm, Open MPI, Kubernetes, TPU pods) train one model together; --devices and
    --batch then count devices and rows over all processes.

    Attributes:
      model: a ready-made size: gpt-1m, gpt-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1m, llama2-7b,
        llama3-8b, llama3-70b, llama3-405b, moe-1m, mixtral-8x7b, qwen3-30b-a3b or deepseek-16b. hf:PATH starts
        from the weights in a Hugging Face folder.
      ordered: sum over devices in a fixed order, so that every number of processes gives the same bits
    """

    model: Annotated[str, Kind("NAME")] = "gpt-1m"
    ordered: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate(Model, Config):
    """Continue prompts with a model, sharded over a mesh.

    jaxshard generate --model hf:PATH --prompt "Once upon a time" --length 64 --mesh data=2,tensor=4

    Without an accelerator it simulates CPU devices, as many as --mesh needs, or one. The JSON object has "tokens", one
    list for each prompt, with the prompt and the stop token; and "text", without the stop token or stop text, and
    for --chat with the answer alone.

    Attributes:
      model: hf:PATH for a folder in the format of Hugging Face transformers, or a ready-made size with --checkpoint
      checkpoint: a folder where jaxshard train saved a run of this model; its newest step is read
      prompt: a text to continue; repeat the flag for several prompts
      prompt_tokens: the token ids of a prompt, such as 1,5,9; repeat the flag for several prompts
      chat: a message that the model answers, written by its chat template; repeat the flag for several conversations
      system: the system message before each --chat
      tokenizer: a tokenizer.json, or a folder that has one; by default that of the model, or bytes of text
      length: the largest number of new tokens; by default 64, or fewer if the model has no more positions
      temperature: divide the logits by this number; 0, the default, takes the most likely token
      top_k: draw from this number of most likely tokens
      top_p: draw from the fewest tokens whose probabilities add up to at least this number
      stop: end at this text, such as '</s>' or '\\n\\n', or at these token ids, such as 2,7; repeatable
      mesh: axes and sizes, such as data=2,tensor=4
      strategy: fsdp shards weights over the axis data and gathers one block at a time, ddp replicates weights
      devices: number of devices to use
      seed: seed of the random draws
    """

    model: Annotated[str, Kind("NAME")]
    checkpoint: Place = None
    prompt: Texts = ()
    prompt_tokens: Texts = ()
    chat: Texts = ()
    system: Text = None
    tokenizer: Place = None
    length: Size = None
    temperature: Real = 0.0
    top_k: Size = None
    top_p: Rate = None
    stop: Texts = ()
    mesh: Text = None
    strategy: StrategyName = "fsdp"
    devices: Size = None
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Launch(Flags):
    """Run a command in several processes on this machine.

    jaxshard launch -n 2 --max-restarts 3 -- jaxshard train --checkpoint run --resume

    Environment variables tell every process how to find the others; js.distributed.initialize() reads them. Output
    lines are shown with the number of their process. If a process fails, the others are ended, and all are started
    again with the same command, which must itself resume from a checkpoint or from memory (jaxshard train
    --memory-every 1). The exit status is 0 if all processes end with 0, else the status of the process that failed
    first (128 + n if signal n ended it). After status 2, for wrong flags, no process is started again.

    Without accelerators jaxshard's own commands share eight simulated devices, or the number of --devices. In a program
    of your own js.simulate_devices(n) gives each process n devices.

    Attributes:
      command: command that every process runs, found on PATH
      processes: number of processes
      max_restarts: how many times all processes may be started again
      grace: seconds between SIGTERM or Ctrl-C, which are passed on to the processes, and SIGKILL
    """

    command: Annotated[tuple[str, ...], Kind("COMMAND ...", is_positional=True)] = ()
    processes: Annotated[int, Kind("N", read_count, alias="-n")]
    max_restarts: Natural = 0
    grace: Annotated[float, Kind("SECONDS", read_rate)] = 20.0


@dataclass(frozen=True, kw_only=True)
class Audit(Targeted, Compute, Config):
    """Compare the collectives of a compiled step with the promises of the strategy.

    It prints every collective that is not promised, and ends with status 1 if there is one. Nothing is trained, and no
    array is made. With --hlo it audits a step that another program has compiled, from its text: give the axes of its
    mesh in their order, with jaxshard's names (data, tensor, ...). Without --strategy its collectives are only listed.

    jaxshard audit --hlo step.txt --mesh data=4,tensor=2 --strategy fsdp

    Attributes:
      hlo: file with the text of a compiled step, from as_text() or an XLA dump, in place of TARGET; needs --mesh
      topology: compile for TPUs that need not be attached, such as v5e:2x4; needs libtpu
      all: print all collectives and instructions, promised or not; by default a summary
    """

    target: Annotated[str, Kind("TARGET", is_positional=True)] = ""
    hlo: File = None
    topology: Text = None
    all: bool = False


@dataclass(frozen=True, kw_only=True)
class Parity(Targeted, Model, Sharding, Config):
    """Compare a sharded step with the same step on one device.

    It runs both steps in f32 and compares all arrays; the status is 1 if an array differs. Without an accelerator it
    simulates 8 CPU devices.

    Attributes:
      batch: rows of a step over all devices; by default about 16
      seed: seed of the parameters, the tokens, and the random draws of the loss
    """

    batch: Size = None
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Plan(Targeted, Compute, Chips, Config):
    """Predict memory, communication and time of a step on absent chips, and whether it fits.

    jaxshard plan llama3-8b --mesh data=256 --topology v5e:16x16 --precision bf16 --batch 256 --seq 8192

    Nothing is computed and no array is made. If the compiler of the chips is installed (libtpu for TPUs), it assigns
    the memory, and "judged_by" in the JSON object is "compiler"; otherwise memory is estimated. "fits" is true, false,
    or null if an estimate is too near the limit. "live_bytes" is the peak of bytes in use, and "allocated_bytes" is
    what the compiler reserves and what must fit; both are per device.

    Attributes:
      chip: predict for the limits of this chip, such as v5e or h100; by default those of --topology or of the devices
      estimate: estimate memory, without a compiler
      codegen: compile to the end, which takes minutes, and print the compiler's verdict with estimated cycles
      plot: draw memory by role into this file, and more pictures into files next to it; needs matplotlib
    """

    chip: Text = None
    estimate: bool = False
    codegen: bool = False
    plot: Picture = None


@dataclass(frozen=True, kw_only=True)
class Search(Targeted, Rows, Chips, Config):
    """Rank the layouts of a model on absent chips, with reasons.

    jaxshard search llama3-8b --topology v5e:16x16 --batch 256 --seq 8192 --precision bf16

    In the JSON object "plans" lists the layouts, the best first, each with its mesh, strategy, seconds per step, bytes
    per device and reason, and with "flags" for jaxshard plan, audit and train.

    Attributes:
      compile: compile the best layouts until this number of them fits; 0 compiles none
    """

    topology: Annotated[str, Kind("TEXT")]
    compile: Natural = 3


@dataclass(frozen=True, kw_only=True)
class Schedule(Result):
    """Print a pipeline schedule with its idle time and its memory.

    A backward pass is assumed to take twice as long as a forward pass, half of it for the gradients of weights.

    Attributes:
      name: gpipe, one_f_one_b, interleaved, zero_bubble, or a CSV file of tick,device,op,chunk,microbatch
      stages: number of devices of the pipeline; a CSV file states its own
      microbatches: number of micro-batches of a batch; a CSV file states its own
      chunks: number of pipeline stages on each device, for interleaved and zero_bubble; by default 2
      plot: draw the schedule into a file such as schedule.png or schedule.svg
    """

    name: Annotated[str, Kind("NAME", is_positional=True)]
    stages: Count = None
    microbatches: Count = None
    chunks: Count = None
    plot: Picture = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Result):
    """List, show or verify saved steps.

    It prints the name of every file that is missing or was added, and under verify of every file with a changed byte.
    The exit status is 1 if there is such a file.

    Attributes:
      action: list the steps in a folder, show the contents of one step, or verify every byte of all steps
      dir: folder, or address s3:// or gs://, that js.save or jaxshard train --checkpoint wrote
      step: look at this step alone; by default show takes the newest step, list and verify take all
    """

    action: Annotated[Literal["list", "show", "verify"], Kind("ACTION", is_positional=True)]
    dir: Annotated[AnyPath, Kind("DIR", as_path, is_positional=True)]
    step: Step = None


@dataclass(frozen=True, kw_only=True)
class Guard(Result):
    """Record what a step communicates, needs and costs in a file, or check it against the file.

    The status is 1 if something changed. Nothing runs: the step is compiled for the devices at hand, or for TPUs and
    GPUs that need not be attached. With a function's name, such as train.py:make_step, the function takes the list of
    devices and returns (jitted, arguments) or (step, batch). A file of HLO text needs --mesh.

    jaxshard guard record train.py:make_step --topology v5e:4x4

    jaxshard guard check

    Attributes:
      action: record, or check against what was recorded
      target: module:function or file.py:function, or a file with the text of a compiled step; check knows it
      file: the file, under version control
      topology: chips to compile for, such as v5e:4x4,h100:8; by default the devices at hand; check takes those recorded
      devices: number of CPU devices to simulate if there is no accelerator; by default 8
      mesh: sizes of the mesh axes of a file of HLO text, in their order, such as data=8
      markdown: write the changes as Markdown into this file, for a comment
    """

    action: Annotated[Literal["record", "check"], Kind("ACTION", is_positional=True)]
    target: Annotated[str, Kind("TARGET", is_positional=True)] = ""
    file: Annotated[AnyPath, Kind("FILE", as_path, alias="-o")] = Path("step.guard.json")
    topology: Text = None
    devices: Size = None
    mesh: Text = None
    markdown: Written = None


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """Print where the time of profiled steps went.

    Of the newest trace in a folder: the time of each step on each device, exposed collectives with their lines in the
    code, what the host did while devices were idle, and the longest operations.

    jaxshard train --steps 10 --profile trace; jaxshard profile trace

    Attributes:
      folder: the folder of --profile, of js.fit(profile=...) or of jax.profiler, or a file in it.
      top: rows of each table; the JSON object has all.
    """

    folder: Annotated[Path, Kind("FOLDER", local_path, is_positional=True)]
    top: Annotated[int, Kind("N", read_count)] = 10


@dataclass(frozen=True, kw_only=True)
class Doctor(Result):
    """Print devices, versions and problems with their remedies.

    It prints devices, versions, the compilation cache, and hosts with their memory, clocks and connections; under
    jaxshard launch, Slurm and the like the hosts of all processes. Problems are bad settings, packages that do not fit
    together, and processes that occupy the TPU. The exit status is 1 if a problem stops every run; a missing optional
    package is no problem.
    """


_ALL: tuple[type[Flags], ...] = (
    Train, Generate, Launch, Audit, Parity, Plan, Search, Schedule, Checkpoint, Guard, Profile, Doctor
)  # fmt: skip
COMMANDS = {command.__name__.lower(): command for command in _ALL}
"""The flags of each command by its name."""
