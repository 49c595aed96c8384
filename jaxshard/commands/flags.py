"""What the flags of a command mean: sizes, meshes with strategies, corpora. Errors name the flag and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console

from jaxshard import data
from jaxshard._mesh import make_mesh
from jaxshard._strategy import Strategy, compose, ddp, fsdp, hsdp, tensor, zero1, zero2
from jaxshard.commands.devices import choose_devices
from jaxshard.engines import auto, explicit
from jaxshard.models import SIZES
from jaxshard.models.decoder import Size
from jaxshard.plan.topology import topology_mesh

Count = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Words = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
EngineName = Literal["explicit", "auto"]

ENGINES = {"explicit": explicit, "auto": auto}

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fsdp,
    "hsdp": hsdp,
}


def size_of(model: str, *, seq: int | None, batch: int | None, steps: int | None, lr: float | None, parts: int) -> Size:
    """The ready-made size with what was given instead of its numbers; a batch of its own is rounded up to divide."""
    if model not in SIZES:
        raise ValueError(f"--model {model}: there is no such size; use one of {', '.join(SIZES)}")
    check_positive(seq=seq, batch=batch, steps=steps, lr=lr)
    size = SIZES[model]
    recipe = size.recipe._replace(
        batch=batch or size.recipe.batch + -size.recipe.batch % parts,
        steps=steps or size.recipe.steps,
        learning_rate=lr or size.recipe.learning_rate,
    )
    return size._replace(shape=size.shape | {"seq": seq or size.shape["seq"]}, recipe=recipe)


def check_positive(**numbers: float | None) -> None:
    """Raises for the flags whose number is given and not above zero."""
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number above 0")


def check_files(**files: Path | None) -> None:
    """Raises before the work where its results could not be written after it."""
    for name, file in files.items():
        if file is None or str(file) == "-":
            continue
        if file.is_dir():
            raise ValueError(f"--{name} {file}: that is a folder; give a file")
        if not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: the folder {file.parent} does not exist; make it, or give another file")


def mesh_and_strategy(
    mesh: str | None, strategy: str, devices: int | None, topology: str | None = None
) -> tuple[Mesh, Strategy]:
    """The mesh over the chosen devices, by default all on the axis data, and the strategy over its axes.

    `strategy` names the data strategy; an axis tensor in the mesh adds tensor parallelism. With a `topology` the mesh
    is over chips that are not here: it compiles, and holds no arrays.
    """
    usual = {"replica": 2, "data": -1} if strategy == "hsdp" else {"data": -1}
    axes = usual if mesh is None else parse_axes(mesh)
    data = {name: size for name, size in axes.items() if name != "tensor"}
    if "tensor" in axes and not data:
        # All devices on the tensor axis: the data strategy has nothing to split.
        axes, data = dict.fromkeys(usual, 1) | axes, usual
    if set(data) != set(usual):
        example = ",".join(f"{name}={count}" for name, count in usual.items())
        raise ValueError(
            f"--mesh {mesh}: the strategy {strategy} needs the axes {' and '.join(usual)}, and tensor if you like; "
            f"write --mesh {example} or --mesh {example},tensor=2, or choose another strategy"
        )
    split = _STRATEGIES[strategy](*usual)
    chosen = choose_devices(devices)
    made = make_mesh(chosen, **axes) if topology is None else topology_mesh(topology, **axes)
    return made, compose(split, tensor()) if "tensor" in axes else split


def parse_axes(text: str) -> dict[str, int]:
    """The axes and sizes in "replica=2,data=4"."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if not name.isidentifier() or not count.removeprefix("-").isdecimal() or name in axes:
            raise ValueError(f"--mesh {text}: write each axis once, as name=size, such as data=8 or replica=2,data=4")
        axes[name] = int(count)
    return axes


def corpus_of(console: Console, path: Path | None, dtype: str | None, vocab: int | None) -> data.Corpus:
    """The corpus at a path, or the standard library; what loading leaves out is noted on the console."""
    if path is None:
        if dtype is not None or vocab is not None:
            raise ValueError("--dtype and --vocab describe a file of token ids; name it with --data")
        return data.stdlib()
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"--dtype {dtype}: there is no such dtype; use one such as uint16 or int32") from error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        corpus = data.load(path, dtype=kind, vocab=vocab)
    for warning in caught:
        console.print(f"note: {warning.message}")
    return corpus
