"""Refuse files that somebody else could have written, because loading them runs code."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_trusted(file: Path) -> bytes:
    """Return the bytes of a file; raise PermissionError if another user owns it, or may write it or its folder.

    The folder is that of the name and, behind a symbolic link, that of the file. Files of root count as the user's own.
    On systems without user ids nothing is checked.
    """
    with file.open("rb") as opened:
        if hasattr(os, "geteuid"):
            _check(file, os.fstat(opened.fileno()))  # of what is read, whatever the name stands for by now
            for folder in {file.absolute().parent, file.resolve().parent}:
                _check(folder, folder.stat())
        return opened.read()


def _check(path: Path, about: os.stat_result) -> None:
    if about.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{path} belongs to user {about.st_uid}, and this process runs as user {os.geteuid()}: loading a "
            "compiled program runs code, so it must come from you; copy it into a folder of your own"
        )
    others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others and not (stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX):
        raise PermissionError(
            f"other users may write {path} (mode {stat.S_IMODE(about.st_mode):o}): loading a compiled program runs "
            f"code, so nobody else may change it; chmod go-w {path}"
        )
