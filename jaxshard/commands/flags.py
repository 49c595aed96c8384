"""The flags that several commands share, each described once, and checks of their values.

tyro makes the command line from signatures. A group of flags is a frozen dataclass, which a command takes as one
parameter and tyro spreads out into single flags; the help of each flag is its line under "Attributes". A flag that
stands alone in several commands is an annotated type. Errors name the flag and how to put it right.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxshard.core.local_path import check_local

StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
EngineName = Literal["explicit", "auto", "pipelined"]
PrecisionName = Literal["bf16", "bfloat16"]
ContextName = Literal["gather", "ulysses", "usp", "ring"]

# Optional flags; without the hint their help would end in "(default: None)".
Count = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Rate = Annotated[float | None, tyro.conf.arg(metavar="X", help_behavior_hint="")]
Words = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
# A folder or an address, as text: a Path would drop one of the slashes of gs://.
Folder = Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Texts = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Number = Annotated[int, tyro.conf.arg(metavar="N")]

_BLOCK = 4096
"""Bytes that file systems give away at a time, at least."""

Target = Annotated[
    str,
    tyro.conf.arg(
        metavar="TARGET",
        help="a ready-made size such as gpt-1m, hf:PATH for a model of Hugging Face's with new weights, or "
        "path/to/file.py:function or package.module:function, a function without arguments that returns (init_fn, "
        "loss_fn, tx, batch).",
    ),
]
Change = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME=VALUE,...",
        help="arguments of js.models.gpt, llama or moe in the place of the size's own, such as depth=4,rope_scaling=8.",
        help_behavior_hint="",
    ),
]
Remat = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="WHAT",
        help="what the forward pass of a block keeps for the backward pass: everything, dots, nothing, or by the names "
        "of activations, such as attention_out=save,block_in=offload (to the host's memory); by default what the "
        "model's size states, nothing in a pipeline.",
        help_behavior_hint="",
    ),
]
Precision = Annotated[
    PrecisionName | None,
    tyro.conf.arg(
        help="bf16, or bfloat16, computes, gathers weights and reduces gradients in bfloat16; parameters and optimizer "
        "state stay f32. By default all is f32.",
        help_behavior_hint="",
    ),
]
JsonFile = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="write the result as one JSON object; - is standard output, and then nothing else goes there.",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True)
class ShardingFlags:
    """The mesh, the placement of arrays on it, and the engine that computes a step.

    Attributes:
      mesh: axes and sizes, such as data=8, replica=2,data=4 or data=2,tensor=2,pipe=2; one size may be -1. An axis
        tensor splits the layers themselves, an axis pipe puts them in stages, an axis context splits long rows, an axis
        expert spreads the experts of a block (moe-1m), and rows too.
      strategy: what is split over the axis data: ddp nothing, zero1 the optimizer state, zero2 gradients too, fsdp, the
        default, parameters too; hsdp is fsdp within each group of an axis replica.
      sync_every: let each group of an axis replica train by itself, and synchronise parameters every so many steps, as
        DiLoCo does.
      sync_warmup: in so many steps at the start groups average their gradients, as with ddp, and only then train by
        themselves; the steps in which the learning rate rises are a good number.
      outer: what the replicas' mean does to the parameters that they share: by default average, which puts it in
        their place; rate=0.7,momentum=0.9 is DiLoCo's own (Nesterov's), for long runs; with --sync-warmup,
        rate=0.5,momentum=0.75 came closest to ddp in short ones.
      engine: explicit issues the collectives itself, auto leaves them to the compiler; with an axis pipe it is
        pipelined.
      schedule: of a pipeline: interleaved, zero_bubble, one_f_one_b, gpipe, or a table's .csv file.
      chunks: stages per device of a pipeline; by default two for a ready-made size with enough blocks, else one.
      context: how attention sees the other parts of a row that an axis context splits: gather keys and values, ulysses
        exchanges heads, usp does both (over a second axis, context_heads), ring passes them around.
      devices: use so many devices, over all processes; simulated ones where there is no accelerator.
      microbatches: compute a batch in so many turns and add their gradients; in a pipeline by default four per device.
      wire: send gradients or weights in fewer bytes, such as gradients=int8,weights=fp8; with block=128 in other blocks
        than of 256 numbers, with feedback=on making up for the errors of gradients. Not under auto.
    """

    mesh: Words = None
    strategy: Annotated[StrategyName | None, tyro.conf.arg(help_behavior_hint="")] = None
    sync_every: Count = None
    sync_warmup: Count = None
    outer: Words = None
    engine: EngineName | None = None
    schedule: Words = None
    chunks: Count = None
    context: ContextName | None = None
    devices: Count = None
    microbatches: Count = None
    wire: Words = None


Sharding = tyro.conf.OmitArgPrefixes[ShardingFlags]


@dataclass(frozen=True)
class DataFlags:
    """The corpus to train on.

    Attributes:
      data: a text file, a folder of text, token ids as .npy or .bin, or with a tokenizer records as .jsonl; without it
        Python's own library.
      dtype: of the token ids in a .bin file, such as uint16.
      vocab: how many token ids there are, for .npy and .bin.
      tokenizer: a tokenizer.json, or a folder that has one, which makes tokens of --data; by default that of the model
        hf:PATH.
      template: of a message in .jsonl, such as '{role}:\\n{content}\\n', the default.
    """

    # Text, not a Path: that of an empty text is the current folder.
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    dtype: Words = None
    vocab: Count = None
    tokenizer: Words = None
    template: Words = None


@dataclass(frozen=True)
class RecipeFlags:
    """Length, batches and learning rate of the training.

    Attributes:
      steps: optimizer steps in all; by default what suits the model.
      batch: rows of a step over all devices; by default what suits the model.
      seq: tokens in a row; by default what suits the model.
      seed: of the parameters and the order of the data.
      lr: the highest learning rate of AdamW; by default what suits the model.
      eval_every: steps between evaluations; by default four in all.
      patience: stop after so many evaluations without a lower held-out loss.
      lora: freeze the model hf:PATH and train low-rank factors of its matrices, as rank=8,alpha=16,base=int8,
        match=q_proj/kernel; rank alone is enough, and then all matrices of blocks have them.
      bad_steps: where loss or gradients are not finite, which changes nothing but the number of the step: raise ends
        the training, skip leaves the batch out, rollback goes back to the newest step in --checkpoint first.
      check_replicas: after every so many steps compare, bit by bit, the copies of all arrays that several devices hold,
        and end the training where they differ; by default never.
    """

    steps: Count = None
    batch: Count = None
    seq: Count = None
    seed: Number = 0
    lr: Rate = None
    eval_every: Count = None
    patience: Count = None
    lora: Annotated[str | None, tyro.conf.arg(metavar="rank=N,...", help_behavior_hint="")] = None
    bad_steps: Literal["raise", "skip", "rollback"] = "raise"
    check_replicas: Count = None


@dataclass(frozen=True)
class SavingFlags:
    """The folder of checkpoints, and the step to go on from.

    Attributes:
      checkpoint: save the run into this folder while it trains, and at the end; each step in a folder of its own.
      resume: go on from the newest step in --checkpoint; from step 0 where there is none.
      checkpoint_every: steps between saves; by default 10.
      keep: so many of the newest saves stay; by default all.
      fall_back: with --resume, go on from the newest step that is intact where newer ones are damaged.
      memory_every: steps between copies of the run into memory that outlives the processes: started again by jaxshard
        launch --max-restarts they go on from there, and need no checkpoint; without it there are no copies.
    """

    checkpoint: File = None
    resume: bool = False
    checkpoint_every: Count = None
    keep: Count = None
    fall_back: bool = False
    memory_every: Count = None


@dataclass(frozen=True)
class OutputFlags:
    """Files that are written, and the sample at the end.

    Attributes:
      sample: how many tokens to draw from the model at the end; 0 for none.
      export: write the trained model into this folder at the end, as transformers reads it, with factors merged.
      log: append the numbers of every step to this file, one JSON object a line.
      tensorboard: write them for TensorBoard into this folder, or at an address gs:// or s3://; needs tensorboardX.
      wandb: write them into a run of this project of Weights & Biases; needs wandb. A run that goes on from
        --checkpoint goes on there too.
      mlflow: write them into a run of this experiment of MLflow, at MLFLOW_TRACKING_URI; needs mlflow.
      profile: write a profile of three steps into this folder, or at an address gs://.
    """

    sample: Number = 160
    export: File = None
    json: JsonFile = None
    log: File = None
    tensorboard: Folder = None
    wandb: Annotated[str | None, tyro.conf.arg(metavar="PROJECT", help_behavior_hint="")] = None
    mlflow: Annotated[str | None, tyro.conf.arg(metavar="EXPERIMENT", help_behavior_hint="")] = None
    profile: Folder = None


def check_positive(**numbers: float | None) -> None:
    """Raise ValueError for a flag whose number is given and not above zero, not finite, or too large for 64 bits."""
    for name, value in numbers.items():
        limit = 2**63 if isinstance(value, int) else math.inf
        if value is not None and not 0 < value < limit:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number above 0 and below {limit}")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that no random key can be made of."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: give a number from 0 to 2**63 - 1")


def check_not_empty(**texts: str | None) -> None:
    """Raise ValueError for a flag whose text is given and empty, as of a variable of the shell that is not set."""
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise ValueError(f"--{name} {text!r} is empty: give a value, or leave the flag out")


def refuse(why: str, **flags: int | str | Path | None) -> None:
    """Raise ValueError for the first of some flags that is given: its name and value, and why it can't be."""
    for name, value in flags.items():
        if value is not None and value is not False:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"--{name.replace('_', '-')}{shown} {why}")


def check_files(**files: Path | None) -> None:
    """Raise ValueError for a file that could not be written later, so that no work is lost."""
    for name, file in files.items():
        if file is None or str(file) == "-":
            continue
        if file.is_dir():
            raise ValueError(f"--{name} {file}: that is a folder; give a file")
        if not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: the folder {file.parent} does not exist; make it, or give another file")
        if not file.exists():
            _try_to_write(file.parent, f"--{name} {file}")
        elif not os.access(file, os.W_OK):
            raise ValueError(f"--{name} {file} can't be written; give another file")


def check_folders(schemes: tuple[str, ...] = (), **folders: str | Path | None) -> None:
    """Raise ValueError for a folder in which nothing could be written later; those above it are made with it.

    Addresses of the given schemes, such as "gs", are not tried.
    """
    for name, given in folders.items():
        if given is None:
            continue
        check_local(given, schemes=schemes)
        folder = Path(given)
        if "://" in str(given):
            continue
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ValueError(f"--{name} {folder}: {there} is a file; give a folder")
        _try_to_write(there, f"--{name} {folder}")


def _try_to_write(folder: Path, what: str) -> None:
    """Write a block into a file without a name; a full or read-only file system refuses it."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".") as file:
            file.write(bytes(_BLOCK))
    except OSError as error:
        raise ValueError(f"{what} can't be written: {error.strerror or error}") from error
