"""What the flags of a command mean: sizes, files, corpora. Errors name the flag and the way out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from jaxshard.data import corpus
from jaxshard.models.decoder import Size
from jaxshard.models.sizes import SIZES

Count = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Words = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
File = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]


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


def corpus_of(console: Console, path: Path | None, dtype: str | None, vocab: int | None) -> corpus.Corpus:
    """The corpus at a path, or the standard library; what loading leaves out is noted on the console."""
    if path is None:
        if dtype is not None or vocab is not None:
            raise ValueError("--dtype and --vocab describe a file of token ids; name it with --data")
        return corpus.stdlib()
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"--dtype {dtype}: there is no such dtype; use one such as uint16 or int32") from error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = corpus.load(path, dtype=kind, vocab=vocab)
    for warning in caught:
        console.print(f"note: {warning.message}")
    return found
