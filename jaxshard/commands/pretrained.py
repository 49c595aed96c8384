"""`--model hf:PATH`: read a model of Hugging Face, whose weights a training begins with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxshard.commands.named_model import PREFIX
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.data.tokenizer import FILE
from jaxshard.hf.config import Config, read_config
from jaxshard.hf.load import load

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
            f"--model {PREFIX}{self.folder}: its vocabulary has {self.vocab} token ids, and {of} has {vocab}; use the "
            "tokenizer that the model was trained with"
        )
