"""Check paths that users pass: files and folders of a mounted file system, never addresses such as gs://."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""The beginning of gs://bucket, or gs:/bucket as `Path` writes it; two letters at least, as C:/ is a drive."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as a `Path`.

    Raises:
      ValueError: the path is an address, which `Path` would turn into a local folder of that name.
    """
    check_local(path)
    return Path(path)


def check_local(path: str | os.PathLike[str], *, schemes: tuple[str, ...] = ()) -> None:
    """Raise ValueError for an address, such as gs://bucket/run; the message has the address as it was given.

    Args:
      path: a path or an address.
      schemes: the schemes of addresses that the caller accepts, such as "gs". An address that was made into a `Path` is
        refused even then, because `Path` drops one of its slashes.
    """
    text = os.fspath(path)
    address = _ADDRESS.match(text)
    if address is None or text.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        return
    shown = text if isinstance(path, str) else f"{address[1]}://{text[address.end() :]}"  # a `Path` dropped a slash
    besides = f", or an address of {', '.join(f'{scheme}://' for scheme in schemes)} as a str" if schemes else ""
    raise ValueError(
        f"{shown}: files are read and written in a mounted file system, not at an address; mount the storage or copy "
        f"the file, and give its path there{besides}"
    )
