"""Load the data of `jaxshard train` as rows: windows of a token array, or packed documents."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxshard.commands.errors import refuse
from jaxshard.commands.flags import Data
from jaxshard.commands.pretrained import Pretrained
from jaxshard.commands.terminal import printable
from jaxshard.data import corpus as corpora
from jaxshard.data.corpus import Corpus
from jaxshard.data.documents import Documents, tokenize
from jaxshard.data.packing import Packed, packed
from jaxshard.data.tokenizer import Tokenizer, tokenizer
from jaxshard.data.windows import Windows, eval_batches, windows
from jaxshard.storage.paths import AnyPath, as_path

EVAL_TOKENS = 2**16
"""The number of held-out tokens in an evaluation, evenly spaced over all of them."""

_TOKENS = (".npy", ".bin")


class TrainingData(NamedTuple):
    """Tokens to train on, with their tokenizer.

    Attributes:
      corpus: the tokens to train on and the held-out tokens: arrays, or documents if there is a tokenizer.
      tokenizer: the tokenizer that made the tokens; None if they are bytes of text, or were given as token ids.
    """

    corpus: Corpus[Any]
    tokenizer: Tokenizer | None = None

    def source(self, batch: int, seq: int, seed: int) -> Windows | Packed:
        """Make the source of the batches to train on; raise ValueError if the data is too short."""
        if isinstance(self.corpus.train, Documents):
            return packed(self.corpus.train, batch=batch, seq=seq, seed=seed)
        return windows(self.corpus.train, batch=batch, seq=seq, seed=seed, vocab=self.corpus.vocab)

    def held_out_batches(self, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
        """Return about `EVAL_TOKENS` held-out tokens as batches; all have `batch` rows if there are enough tokens."""
        count = EVAL_TOKENS // seq
        limit = max(batch, count - count % batch)
        return list(eval_batches(self.corpus.held_out, batch=batch, seq=seq, limit=limit, vocab=self.corpus.vocab))

    @property
    def facts(self) -> dict[str, Any]:
        """Describe the data: name, "sha256" of the tokens, "vocab", "unit" ("byte" or "token"), number of tokens."""
        corpus = self.corpus
        train, held_out = (len(part.tokens if isinstance(part, Documents) else part) for part in corpus[1:3])
        return {
            "name": corpus.name,
            "sha256": corpus.digest,
            "vocab": corpus.vocab,
            "unit": "byte" if self._is_bytes else "token",
            "train_tokens": train,
            "held_out_tokens": held_out,
        }

    def prompt(self, length: int) -> np.ndarray:
        """Return at most `length` of the first held-out tokens; of a conversation the part before the first answer."""
        held_out = self.corpus.held_out
        if not isinstance(held_out, Documents):
            return np.asarray(held_out[:length], np.int32)
        first = held_out.part(0, 1)
        count = len(first.tokens) if first.answers is None else int(np.argmax(first.answers))
        return np.asarray(first.tokens[: max(1, min(length, count))], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Convert tokens to text without control characters; token ids without a tokenizer become numbers: "5 17 2"."""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(tokens)
        elif self._is_bytes:
            text = bytes(tokens.astype(np.uint8)).decode(errors="replace")
        else:
            return " ".join(map(str, tokens))
        return printable(text)

    @property
    def _is_bytes(self) -> bool:
        return (
            not isinstance(self.corpus.train, Documents)
            and self.corpus.train.dtype == np.uint8
            and self.corpus.vocab == 256
        )


def load_data(console: Console, flags: Data, base: Pretrained | None) -> TrainingData:
    """Load the data that --data names; print a note for every file that is left out.

    Args:
      console: the console for notes.
      flags: the flags about data.
      base: the model whose weights the training starts from; its tokenizer is the default, and its vocabulary must
        match the tokens.

    Raises:
      ValueError: a flag needs another flag, the dtype does not exist, the data can't be used, or its vocabulary differs
        from the model's.
      OSError: a file can't be read.
      ImportError: the library for tokenizers is not installed.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        data = _load(flags, base)
    notes = [str(warning.message) for warning in caught]
    if base is not None:
        of = f"the tokenizer {data.tokenizer.file}" if data.tokenizer is not None else str(flags.data)
        notes.append(base.check_vocab(data.corpus.vocab, of))
    for note in filter(None, notes):
        console.print(f"note: {note}")
    return data


def _load(flags: Data, base: Pretrained | None) -> TrainingData:
    if flags.data is None:
        refuse("describes a file of token ids; name it with --data", dtype=flags.dtype, vocab=flags.vocab)
        refuse("makes tokens of a text; name it with --data", tokenizer=flags.tokenizer, template=flags.template)
        if base is not None:
            raise ValueError("--model hf:PATH is fine-tuned on your own data: add --data FILE")
        return TrainingData(corpora.stdlib())
    path = as_path(flags.data)
    tokens = path.suffix in _TOKENS and not path.is_dir()
    made_by = flags.tokenizer or (None if base is None or tokens else base.tokenizer)
    if made_by is None:
        return TrainingData(_load_plain(path, flags, base, tokens))
    why = "is for token ids in .npy and .bin files; a tokenizer knows its own"
    refuse(why, dtype=flags.dtype, vocab=flags.vocab)
    template = None if flags.template is None else flags.template.replace("\\n", "\n").replace("\\t", "\t")
    used = tokenizer(made_by)
    if base is not None:
        base.check_vocab(used.vocab, f"the tokenizer {used.file}")  # before hours of tokenising
    return TrainingData(tokenize(path, used, template=template), used)


def _load_plain(path: AnyPath, flags: Data, base: Pretrained | None, tokens: bool) -> Corpus[np.ndarray]:
    """Load data without a tokenizer: token ids from a .npy or .bin file, or the bytes of text."""
    refuse("is for records that a tokenizer reads: add --tokenizer PATH", template=flags.template)
    if base is not None and not tokens:
        raise ValueError(
            f"--data {path}: {base.folder} has no tokenizer.json to read it with; add --tokenizer PATH, or give token "
            "ids as .npy or .bin"
        )
    if path.suffix == ".jsonl" and not tokens:
        warnings.warn(f"{path} is read as plain text, byte by byte; --tokenizer reads its records", stacklevel=2)
    try:
        dtype = None if flags.dtype is None else np.dtype(flags.dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"--dtype {flags.dtype}: there is no such dtype; use one such as uint16 or int32") from error
    if dtype is not None and dtype.kind not in "iu":
        raise ValueError(f"--dtype {flags.dtype}: token ids are integers; use one such as uint16 or int32")
    return corpora.load(path, dtype=dtype, vocab=flags.vocab if base is None else flags.vocab or base.vocab)
