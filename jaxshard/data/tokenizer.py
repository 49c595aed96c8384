"""`Tokenizer`: convert text to token ids and back, by a `tokenizer.json` and the optional library `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxshard.core.local_path import local_path

FILE = "tokenizer.json"


class Tokenizer:
    """Convert text to token ids and back; made by `tokenizer`.

    Attributes:
      file: the `tokenizer.json`.
      vocab: the number of token ids, including added tokens: the largest id plus 1.
      end: the id of the token that ends a document, or None if no file in the folder names one.
      template_file: the file in the folder that contains a chat template (a Jinja program), or None.
      digest: SHA-256 of the file and of `end`, in hexadecimal.
    """

    def __init__(self, file: Path, library: Any, end: int | None, template_file: Path | None) -> None:
        self.file, self.end, self.template_file, self._library = file, end, template_file, library
        self.vocab: int = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.digest = hashlib.sha256(file.read_bytes() + f"end {end}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Int[np.ndarray, " tokens"]]:
        """Tokenise texts, each with the special tokens that the tokenizer adds (such as "<s>" at the beginning)."""
        return [np.array(one.ids, np.int64) for one in self._library.encode_batch(list(texts))]

    def encode_part(self, text: str) -> list[int]:
        """Tokenise a part of a text, without the special tokens that the tokenizer adds to a full text."""
        return [int(token) for token in self._library.encode(text, add_special_tokens=False).ids]

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenise texts, and return the range of characters of each token.

        Returns:
          For each text (ids int64[tokens], spans int64[tokens, 2]). A span is (begin, end) of the token in the text, or
          (0, 0) for a special token that the tokenizer added.
        """
        found = self._library.encode_batch(list(texts))
        return [(np.array(one.ids, np.int64), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in found]

    def decode(self, tokens: Iterable[int] | Int[np.ndarray, " tokens"]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._library.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def text_of(self, token: int) -> str:
        """Return the text of one token, such as "</s>"; empty for an id that the tokenizer lacks."""
        return self._library.id_to_token(token) or ""


def tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer: a `tokenizer.json`, or a folder that contains one, such as a Hugging Face model.

    The token that ends a document is "eos_token" in the `tokenizer_config.json` of the same folder, or else the (first)
    "eos_token_id" in its `config.json`. The file's options for truncation and padding are ignored.

    Args:
      path: the file or the folder.

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
    file = local_path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer: {file} does not exist{_other_kinds(file.parent)}")
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
    return Tokenizer(file, library, _end_of(file.parent, library), _template_file(file.parent))


def _other_kinds(folder: Path) -> str:
    """Return the end of the error message for a folder without tokenizer.json: how to make this file."""
    others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
    if not others:
        return f"; give a {FILE}, or a folder that has one"
    return (
        f"; the folder has {others[0]}, an older form: transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained(...) writes a {FILE}"
    )


def _end_of(folder: Path, library: Any) -> int | None:
    """Return the id of the end token in tokenizer_config.json or config.json of a folder; None if neither names one."""
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None:
        number: int | None = library.token_to_id(str(token))
        if number is None:
            raise ValueError(
                f"tokenizer: {folder / 'tokenizer_config.json'} names the eos_token {token!r}, which "
                f"{FILE} lacks; put that right in one of the two"
            )
        return number
    number = _read(folder / "config.json").get("eos_token_id")
    number = next(iter(number), None) if isinstance(number, list) else number
    return number if isinstance(number, int) and library.id_to_token(number) is not None else None


def _template_file(folder: Path) -> Path | None:
    if (folder / "chat_template.jinja").is_file():
        return folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    return config if _read(config).get("chat_template") else None


def _read(file: Path) -> dict[str, Any]:
    """Decode a JSON file with an object; return {} if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tokenizer: {file} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}
