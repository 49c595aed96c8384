"""Check before a command works that its files and folders can be written, so that no work is lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxshard.commands.flags import Flags
from jaxshard.commands.parse import flags_of
from jaxshard.core.local_path import check_local
from jaxshard.storage.paths import AnyPath, ObjectPath

_BLOCK = 4096
"""Bytes that file systems give away at a time, at least."""


def check_files(flags: Flags) -> None:
    """Raise ValueError if a file that the flags name for output can't be written."""
    for flag in flags_of(type(flags)).values():
        file: AnyPath | None = getattr(flags, flag.name) if flag.kind.is_written else None
        if file is None or str(file) == "-":
            continue
        if isinstance(file, ObjectPath):
            _try_to_write_object(file.parent, f"{flag} {file}")
            continue
        if file.is_dir():
            raise ValueError(f"{flag} {file}: that is a folder; give a file")
        if not file.parent.is_dir():
            raise ValueError(f"{flag} {file}: the folder {file.parent} does not exist; make it, or give another file")
        if not file.exists():
            _try_to_write(file.parent, f"{flag} {file}")
        elif not os.access(file, os.W_OK):
            raise ValueError(f"{flag} {file} can't be written; give another file")


def check_folder(flag: str, given: str | AnyPath | None, schemes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if an output folder can't be written; neither it nor its parents need to exist.

    An address as a str, such as "gs://bucket", is accepted unchecked if its scheme is in `schemes`.
    """
    if given is None:
        return
    if isinstance(given, ObjectPath):
        _try_to_write_object(given, f"{flag} {given}")
        return
    check_local(given, schemes=schemes)
    if "://" in str(given):
        return
    folder = Path(given)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{flag} {folder}: {there} is a file; give a folder")
    _try_to_write(there, f"{flag} {folder}")


def _try_to_write_object(folder: ObjectPath, what: str) -> None:
    """Write and delete an object in a folder; raise ValueError if credentials, bucket or permission are missing."""
    try:
        folder.try_to_write()
    except OSError as error:
        reason = str(error).partition(": ")[2]  # without the address of the object
        raise ValueError(f"{what} can't be written: {reason}") from error


def _try_to_write(folder: Path, what: str) -> None:
    """Write a temporary file in a folder; raise ValueError if the file system is full or read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".") as file:
            file.write(bytes(_BLOCK))
    except OSError as error:
        raise ValueError(f"{what} can't be written: {error.strerror or error}") from error
