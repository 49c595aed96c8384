"""Refuse files that somebody else could have written, because loading them runs code."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def check_trusted(file: Path) -> None:
    """Raise PermissionError if another user owns a file, or may write it or the folder that it is in.

    Files of root count as the user's own. On systems without user ids nothing is checked.
    """
    if not hasattr(os, "geteuid"):
        return
    for path in (file, file.resolve().parent):
        about = path.stat()
        if about.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                f"{path} belongs to user {about.st_uid}, and this process runs as user {os.geteuid()}: loading a "
                "compiled program runs code, so it must come from you; copy it into a folder of your own"
            )
        others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others and not (path.is_dir() and about.st_mode & stat.S_ISVTX):
            raise PermissionError(
                f"other users may write {path} (mode {stat.S_IMODE(about.st_mode):o}): loading a compiled program runs "
                f"code, so nobody else may change it; chmod go-w {path}"
            )
