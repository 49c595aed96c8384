"""The folder in shared memory for copies of a run, which `jaxshard launch` makes, locks and removes.

    /dev/shm/jaxshard-memory-x1y2z3/    the folder of one launch
        .lock                           locked by flock(2) as long as the launch lives; has the name of its process
        process-0, process-1, ...       the copies of each process, see segment.py

A launch that is killed leaves its folder without a lock, and the next launch on the machine removes it. This file does
not import JAX, for the launcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxshard.checkpoint.lock import LOCK, hold, release
from jaxshard.core.launch_environment import MEMORY

SHARED = Path("/dev/shm")
"""The folder of Linux whose files are in memory, in which all programs may write."""
PREFIX = "jaxshard-memory-"


@contextlib.contextmanager
def memory_folder(*, make: bool = True) -> Iterator[dict[str, str]]:
    """Make a folder in shared memory for one launch, and remove it at the end of the context.

    Folders that killed launches of this user left behind are removed first.

    Args:
      make: False to make no folder, and yield an empty dict.

    Yields:
      Environment variables for the launched processes, {"JAXSHARD_MEMORY": folder}. An empty dict if the variable is
      already set (whoever set it removes that folder), or on a system without shared memory.
    """
    if not make or MEMORY in os.environ or not os.access(SHARED, os.W_OK):
        yield {}
        return
    for folder in find_leftovers():
        remove(folder)
    folder = _make()
    try:
        yield {MEMORY: str(folder)}
    finally:
        remove(folder)
        release(folder)


def find_leftovers() -> list[Path]:
    """Return the folders in shared memory that killed launches of this user left behind."""
    if not hasattr(os, "getuid") or not SHARED.is_dir():
        return []
    found = []
    for folder in sorted(SHARED.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and not _is_locked(folder):
                found.append(folder)
    return found


def size_of(folder: Path) -> int:
    """Return the total bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Delete a folder with its contents, ignoring errors."""
    shutil.rmtree(folder, ignore_errors=True)


def _make() -> Path:
    """Make a new folder in shared memory, and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another launch removed it as a leftover
            hold(folder)
            folder.chmod(0o700)
            return folder


def _is_locked(folder: Path) -> bool:
    """Return True if the launch that made a folder is still running, and so holds the folder's lock."""
    import fcntl

    try:
        opened = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False
