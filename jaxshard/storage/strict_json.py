"""Read untrusted files and JSON: only plain files of limited size, only objects with unique keys and finite numbers."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxshard.storage.paths import AnyPath, ObjectPath

_LARGEST = 1 << 28
"""The largest file to read, in bytes: enough for a million arrays. A sparse file could have any size."""


def read_plain_file(file: AnyPath) -> bytes:
    """Return the bytes of a plain file of at most 256 MiB.

    Raises:
      OSError: the file is not a plain file (see `check_plain_file`), or is larger.
    """
    if isinstance(file, ObjectPath):
        raw = file.read_bytes()
    else:
        check_plain_file(file)
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise OSError(errno.EFBIG, f"larger than {_LARGEST} bytes", str(file))
    return raw


def check_plain_file(file: Path) -> None:
    """Raise OSError unless a path is a plain file, or a link to one; opening a named pipe could wait forever.

    Raises:
      OSError: the path does not exist, or is something else, such as a folder; `strerror` says which.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a plain file", str(file))


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:20]} is no finite number")
    return number


def decode_object(
    text: bytes, *, parse_int: Callable[[str], Any] = int, parse_float: Callable[[str], Any] = _finite
) -> dict[str, Any]:
    """Decode a JSON object whose keys are unique and whose numbers are finite.

    Args:
      text: the object as UTF-8; its first byte must be the opening brace.
      parse_int: converts the text of an integer to a value.
      parse_float: converts the text of any other number ("0.5", "1e3", "NaN", "Infinity") to a value; by default to a
        float, which must be finite.

    Raises:
      ValueError: the text is not such an object; the message says why.
    """
    if not text.startswith(b"{"):
        raise ValueError("it does not begin with a brace")
    try:
        fields: dict[str, Any] = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=parse_float,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("one key twice")
    return made
