"""`Tokenizer`: convert text to token ids and back, by a `tokenizer.json` and the optional library `tokenizers`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxshard.core.bounds import LARGEST_SIZE, is_too_large
from jaxshard.data.chat_template import ChatTemplate, Messages
from jaxshard.data.tokenizer_folder import chat_template, end_of_text
from jaxshard.storage.copies import local_copy
from jaxshard.storage.paths import ObjectPath, as_path

FILE = "tokenizer.json"
BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*.jinja")
"""The names of the files of a model that are not its weights."""


class Tokenizer:
    """Convert text to token ids and back; made by `tokenizer`.

    Attributes:
      file: the `tokenizer.json`.
      vocab: the number of token ids, including added tokens: the largest id plus 1.
      end: the id of the token that ends a document, or None if no file in the folder names one.
      chat_template: the chat template in the folder (a Jinja program that writes conversations), or None.
      digest: SHA-256 of the file and of `end`, in hexadecimal.
    """

    def __init__(self, file: Path, library: Any, end: int | None, chat_template: ChatTemplate | None) -> None:
        self.file, self.end, self.chat_template, self._library = file, end, chat_template, library
        self.vocab: int = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab > LARGEST_SIZE:
            raise ValueError(f"tokenizer: {file} has the token id {self.vocab - 1}; ids must be below {LARGEST_SIZE}")
        self.digest = hashlib.sha256(file.read_bytes() + f"end {end}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Int[np.ndarray, " tokens"]]:
        """Tokenise texts, each with the special tokens that the tokenizer adds (such as "<s>" at the beginning)."""
        with self._failures():
            encoded = self._library.encode_batch(list(texts))
        return [np.array(one.ids, np.int64) for one in encoded]

    def encode_part(self, text: str) -> list[int]:
        """Tokenise a part of a text, without the special tokens that the tokenizer adds to a full text."""
        with self._failures():
            return [int(token) for token in self._library.encode(text, add_special_tokens=False).ids]

    def encode_with_spans(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenise texts, and return the range of characters of each token.

        Args:
          texts: the texts.
          add_special_tokens: also add special tokens (such as "<s>" at the beginning), as `encode` does.

        Returns:
          For each text (ids int64[tokens], spans int64[tokens, 2]). A span is (begin, end) of the token in the text, or
          (0, 0) for a special token that the tokenizer added.
        """
        with self._failures():
            found = self._library.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [(np.array(one.ids, np.int64), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in found]

    def apply_chat_template(
        self, messages: Messages, *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Tokenise a conversation by the tokenizer's chat template, as the method of this name in transformers.

        The template runs in a child process, for at most 5 seconds of CPU time.

        Args:
          messages: {"role": ..., "content": ...} of each message.
          tools: descriptions of the functions that the model may call, as JSON objects.
          add_generation_prompt: end where the assistant is to answer, for `js.generate`.

        Raises:
          ValueError: there is no chat template, or it refuses the messages or can't be used.
          ImportError: jinja2 is not installed.
        """
        if self.chat_template is None:
            raise ValueError(
                f"tokenizer: {self.file.parent} has no chat template; write the text of the prompt yourself"
            )
        with self.chat_template.renderer() as renderer:
            text = renderer.render(messages, tools, add_generation_prompt=add_generation_prompt).text
        return self.encode_part(text)

    def decode(self, tokens: Iterable[int] | Int[np.ndarray, " tokens"]) -> str:
        """Return the text of token ids, special tokens included."""
        with self._failures():
            text: str = self._library.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def text_of(self, token: int) -> str:
        """Return the text of one token, such as "</s>"; empty for an id that the tokenizer lacks."""
        return self._library.id_to_token(token) or ""

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert a panic of the library inside the `with` block, such as of a pattern without end, to a ValueError."""
        try:
            yield
        except BaseException as error:
            if not is_too_large(error):
                raise
            raise ValueError(f"tokenizer: {self.file} can't be used for these texts or tokens: {error}") from error


def tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer: a `tokenizer.json`, or a folder that contains one, such as a Hugging Face model.

    The token that ends a document is "eos_token" in the `tokenizer_config.json` of the same folder, or else the (first)
    "eos_token_id" in its `generation_config.json` or `config.json`. The file's options for truncation and padding are
    ignored.

    Args:
      path: the file or the folder, or its address s3://... or gs://...

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: nothing at the path, or a folder without a `tokenizer.json`.
      ValueError: a file that is not a tokenizer, or that lacks the end token.
      ImportError: the library `tokenizers` is not installed.

    Example:
        tokenizer = js.data.tokenizer("tokenizer.json")
        (ids,) = tokenizer.encode(["a text"])
        tokenizer.decode(ids)
    """
    file = find_tokenizer(path)
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise ImportError("tokenizer: the library tokenizers is missing: pip install -e '.[hf]'") from error
    try:
        library = Library.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"tokenizer: {file} is no tokenizer that can be read: {error}") from error
    library.no_truncation()
    library.no_padding()
    return Tokenizer(file, library, end_of_text(file.parent, library), chat_template(file.parent))


def find_tokenizer(path: str | os.PathLike[str]) -> Path:
    """Return the tokenizer.json at a path, or in the folder there; for an address a copy, with the files next to it.

    Raises:
      FileNotFoundError: there is no such file.
    """
    given = as_path(path)
    if isinstance(given, ObjectPath):
        is_file = given.is_file()
        folder = local_copy(given.parent if is_file else given, BESIDE)
        file = folder / (given.name if is_file else FILE)
    else:
        file = given / FILE if given.is_dir() else given
    if not file.is_file():
        shown = file if isinstance(given, Path) else given
        raise FileNotFoundError(f"tokenizer: {shown} does not exist{_other_kinds(file.parent)}")
    return file


def _other_kinds(folder: Path) -> str:
    """Return the end of the error message for a folder without tokenizer.json: how to make this file."""
    others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
    if not others:
        return f"; give a {FILE}, or a folder that has one"
    return (
        f"; the folder has {others[0]}, an older form: transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained(...) writes a {FILE}"
    )
