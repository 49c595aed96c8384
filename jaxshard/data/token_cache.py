"""Cache tokenised documents: a folder of arrays for each corpus, named by a hash of its data, tokenizer and template.

A folder is written under a temporary name and renamed when it is complete, so that several processes may write it at
the same time. It is verified by its checksum when it is read; a damaged folder is written again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxshard.core.local_path import local_path
from jaxshard.data.corpus import hash_tokens

_FACTS = "facts.json"


class TokenFiles(NamedTuple):
    """The content of a cache folder: the arrays of a `js.data.Documents`, and which documents are held out.

    Attributes:
      tokens: the tokens of all documents.
      starts: int64[documents + 1], the index of the first token of each document.
      answers: bool[tokens], True for tokens that are learned; None if all tokens are.
      lines: int64[documents], the line number of each document in its file; None if documents are not lines.
      held_out: the number of documents held out: the last ones.
      notes: warnings about documents that were left out.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray | None
    lines: np.ndarray | None
    held_out: int
    notes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return the SHA-256 over all arrays, in hexadecimal."""
        return hash_tokens(list(self.arrays.values()))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return {name: array}, without arrays that are None."""
        arrays = {"tokens": self.tokens, "starts": self.starts, "answers": self.answers, "lines": self.lines}
        return {name: array for name, array in arrays.items() if array is not None}


def load_tokens(cache: str | Path | None, name: str, key: str) -> TokenFiles | None:
    """Memory-map the tokens of a corpus in the cache; return None if they are missing or damaged.

    Args:
      cache: the folder of the cache; None for the default.
      name: the name of the corpus.
      key: a hash of its data, tokenizer and template.
    """
    folder = _folder(cache, name, key)
    try:
        facts = json.loads((folder / _FACTS).read_text())
        arrays = {one: np.load(folder / f"{one}.npy", mmap_mode="r") for one in facts["arrays"]}
        held, notes = facts["held_out"], tuple(facts["notes"])
        found = TokenFiles(arrays["tokens"], arrays["starts"], arrays.get("answers"), arrays.get("lines"), held, notes)
        return found if found.digest == facts["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_tokens(cache: str | Path | None, name: str, key: str, found: TokenFiles) -> str | None:
    """Write the tokens of a corpus to the cache; return None, or an error message if writing failed.

    Args:
      cache: the folder of the cache; None for the default.
      name: the name of the corpus.
      key: a hash of its data, tokenizer and template.
      found: the tokens.
    """
    folder = _folder(cache, name, key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            for one, array in found.arrays.items():
                np.save(made / f"{one}.npy", array)
            arrays, held_out = list(found.arrays), found.held_out
            facts = {"arrays": arrays, "sha256": found.digest, "held_out": held_out, "notes": found.notes}
            (made / _FACTS).write_text(json.dumps(facts))
            if load_tokens(cache, name, key) is None:  # else another process was faster
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    return None


def _folder(cache: str | Path | None, name: str, key: str) -> Path:
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxshard" / "tokens"
    return local_path(cache) / f"{name[:64]}-{key[:32]}"
