"""Cache the answers of compilers in a folder, so that the same program is not compiled a second time.

An answer is one compressed file, named by a hash of the program, the compiler's options and version, and the topology.
When the folder is too large, the least recently used files are removed; a damaged file counts as missing.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 2**20
"""The size of the folder above which the least recently used answers are removed."""


def answer_key(parts: Iterable[bytes]) -> str:
    """Hash a request to a compiler (program, options, version, topology) to the key of its answer in the cache."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def load_answer(key: str) -> dict[str, Any] | None:
    """Read the compiler's answer from the cache; None if no answer has this key, or its file is damaged."""
    file = _folder() / f"{key}.json.gz"
    try:
        found = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # marks it as recently used
    return found if isinstance(found, dict) else None


def save_answer(key: str, answer: dict[str, Any]) -> None:
    """Save the compiler's answer in the cache; do nothing if the folder of the cache can't be written."""
    folder = _folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=folder, suffix=".new")
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(json.dumps(answer).encode(), 6))
        os.replace(made, folder / f"{key}.json.gz")  # atomic: readers never see an incomplete file
        _trim(folder)


def _trim(folder: Path) -> None:
    """Remove the least recently used answers until the cache has at most `MOST_BYTES` bytes."""
    found = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda one: -one[0].st_mtime)
    total = 0
    for about, file in found:
        total += about.st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxshard" / "compiled"
