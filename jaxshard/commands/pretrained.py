"""`--model hf:PATH`: read a model of Hugging Face, whose weights a training begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.data.tokenizer import FILE
from jaxshard.hf.config import Config, read_config
from jaxshard.hf.folder import find_folder
from jaxshard.hf.load import load
from jaxshard.models.recipe import Recipe, Size

_PREFIX = "hf:"

RECIPE = Recipe(batch=16, steps=100, learning_rate=2e-5, warmup=10, b2=0.999, weight_decay=0.0)
"""How a model is fine-tuned unless flags say otherwise."""

ROW = 1024
"""Tokens in a row where --seq is not given; fewer for a model that takes fewer."""

_PADDING = 0.02
"""The share of a vocabulary that may be unused rows, which make its size a multiple of 64."""


class Pretrained(NamedTuple):
    """A folder of a model.

    Attributes:
      folder: where config.json and the weights are.
      vocab: the rows of its token embedding.
      seq: the largest number of positions in a row.
    """

    folder: Path
    vocab: int
    seq: int

    @property
    def tokenizer(self) -> Path | None:
        """The model's own tokenizer; None where the folder has none."""
        return self.folder if (self.folder / FILE).is_file() else None

    @property
    def config(self) -> Config:
        """Its config.json, which is written again with the trained model."""
        config = read_config(self.folder)
        return config._replace(arguments=config.family.make(**config.arguments).arguments)

    def load(self, layout: Layout) -> PyTree:
        """Read the weights onto a layout, in f32, as the command trains."""
        return load(self.folder, layout, dtype="float32")

    def check_vocab(self, vocab: int, of: str) -> str:
        """Compare the model's vocabulary with the tokenizer's; return a note about unused rows.

        Raises:
          ValueError: it differs, other than by rows that make it a multiple of 64.
        """
        unused = self.vocab - vocab
        if not unused:
            return ""
        if 0 < unused <= _PADDING * self.vocab and self.vocab % 64 == 0:
            return (
                f"{unused} of the {self.vocab} rows of the model's vocabulary are padding: {of} has {vocab} token ids"
            )
        raise ValueError(
            f"--model {_PREFIX}{self.folder}: its vocabulary has {self.vocab} token ids, and {of} has {vocab}; use the "
            "tokenizer that the model was trained with"
        )


def is_pretrained(name: str) -> bool:
    """Return True for "hf:PATH"."""
    return name.startswith(_PREFIX)


def folder_of(name: str) -> Path:
    """Return the folder of the model "hf:PATH".

    Raises:
      FileNotFoundError, ValueError: as `js.hf.model`; an address hf://.
    """
    path = name.removeprefix(_PREFIX)
    if path.startswith("//"):
        raise ValueError(f"{name} is an address; write {_PREFIX}{path.lstrip('/')}, the name of a model or its folder")
    return find_folder(path)


def pretrained_size(name: str) -> Size:
    """Describe the model of "hf:PATH" as a ready-made size, with the numbers in its config.json.

    Raises:
      FileNotFoundError, ValueError: as `js.hf.model`.
    """
    config = read_config(folder_of(name))
    return Size(config.arguments, RECIPE, config.family.make, "nothing")


def find_pretrained(name: str, changes: dict[str, Any]) -> Pretrained | None:
    """Return the folder of "hf:PATH"; None for the name of a ready-made size.

    Raises:
      FileNotFoundError, ValueError: as `js.hf.model`.
    """
    if not is_pretrained(name):
        return None
    shape = pretrained_size(name).shape | changes
    return Pretrained(folder_of(name), shape["vocab"], shape["seq"])
