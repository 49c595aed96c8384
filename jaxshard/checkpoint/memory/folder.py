"""The folder of runs in memory, which `jaxshard launch` makes, locks and removes.

    /dev/shm/jaxshard-memory-x1y2z3/    of this user, of one launch
        .lock                           flock(2), as long as the launch lives, with its name
        process-0, process-1, ...       segment.py

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
"""Linux's file system in memory, which all programs may write."""
PREFIX = "jaxshard-memory-"


@contextlib.contextmanager
def memory_folder(*, make: bool = True) -> Iterator[dict[str, str]]:
    """Make a folder for one launch, and remove it at the end; first remove leftovers of this user's dead launches.

    Args:
      make: False to do nothing.

    Yields:
      The environment variable that names the folder. An empty dict if the caller's environment has it already, since
      its owner removes the folder, or on a system without shared memory.
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
    """Return the folders of this user's launches that have ended without removing them."""
    if not hasattr(os, "getuid") or not SHARED.is_dir():
        return []
    found = []
    for folder in sorted(SHARED.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and not _is_locked(folder):
                found.append(folder)
    return found


def size_of(folder: Path) -> int:
    """Return the bytes of memory of the files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Delete a folder with its contents, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


def _make() -> Path:
    """Make a folder and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another launch removed it as a leftover
            hold(folder)
            folder.chmod(0o700)
            return folder


def _is_locked(folder: Path) -> bool:
    """Return True if the launch that made a folder is alive."""
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
