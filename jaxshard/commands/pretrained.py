"""`--model hf:PATH`: read a model of Hugging Face, whose weights a training begins with."""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.commands.named_model import PREFIX
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.data.tokenizer import FILE
from jaxshard.hf.config import Config, read_config
from jaxshard.hf.load import load
from jaxshard.storage.paths import AnyPath

_PADDING = 0.02
"""The share of a vocabulary that may be unused rows, which make its size a multiple of 64."""


class Pretrained(NamedTuple):
    """A folder with a Hugging Face model, whose weights a training starts from.

    Attributes:
      folder: the folder of config.json and the weights.
      vocab: the number of rows of the token embedding.
      seq: the largest number of positions in a row.
    """

    folder: AnyPath
    vocab: int
    seq: int

    @property
    def tokenizer(self) -> AnyPath | None:
        """The file of the model's own tokenizer; None if the folder has none."""
        return self.folder if (self.folder / FILE).is_file() else None

    @property
    def config(self) -> Config:
        """The contents of config.json, which an export of the trained model writes again."""
        config = read_config(self.folder)
        return config._replace(arguments=config.family.make(**config.arguments).arguments)

    def load(self, layout: Layout) -> PyTree:
        """Read the weights in f32, sharded over devices as the layout says."""
        return load(self.folder, layout, dtype="float32")

    def check_vocab(self, vocab: int, of: str) -> str:
        """Check that the model has as many token ids as the data; return a note about unused rows, or "".

        Args:
          vocab: the number of token ids of the data.
          of: the tokenizer or the data, for messages.

        Raises:
          ValueError: the numbers differ by more than the padding of the model's embedding to a multiple of 64 rows.
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
