"""The folder in which runs are kept in memory: made, locked and removed by `jaxshard launch`.

    /dev/shm/jaxshard-memory-x1y2z3/    of this user, of one launch
        .lock                           flock(2), as long as the launch lives, with its name
        process-0, process-1, ...       segment.py

A launch that is killed leaves its folder without a lock: the next one on the machine removes it. No JAX is imported
here, for the launcher outlives many runs.
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
"""The file system of Linux that lies in memory, which all programs may write."""
PREFIX = "jaxshard-memory-"


@contextlib.contextmanager
def memory_folder(*, make: bool = True) -> Iterator[dict[str, str]]:
    """Make a folder for one launch, and remove it at the end; first remove what dead launches of this user left.

    Args:
      make: False to do nothing.

    Yields:
      The environment variable that names the folder. Nothing where the caller's environment has it already, since whose
      folder that is removes it, and nothing on a system without shared memory.
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
    """Return the bytes of memory that the files in a folder take."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def remove(folder: Path) -> None:
    """Delete a folder and what is in it, as far as it can be deleted."""
    shutil.rmtree(folder, ignore_errors=True)


def _make() -> Path:
    """Make a folder and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # somebody else took it for a leftover
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
