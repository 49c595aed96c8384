"""The lock on a folder of checkpoints: only one training may save into a folder.

The training process (the first of several) holds flock(2) on the file `.lock` in the folder, and writes its name into
the file, for error messages of other processes. The kernel releases the lock when the process ends, also by a crash;
the file may remain, which has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"
_TRIES, _PAUSE = 10, 0.05
"""Attempts to lock, and seconds between them: a killed process takes a moment to end; `check_free` locks briefly."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: dict[str, tuple[int, int]] = {}
"""(open file, number of holders in this process) of every folder that this process has locked."""
_guard = threading.Lock()


def hold(root: Path) -> None:
    """Lock a folder for this process, and create the folder if needed; call `release` once per `hold`.

    A process may hold the lock several times. If the file system has no locks, warn and continue without a lock.

    Raises:
      BlockingIOError: another process holds the lock; the message names that process.
      OSError: the lock file can't be written (no permission, a read-only disk).
    """
    name = os.path.realpath(root)
    with _guard:
        if name in _held:
            opened, count = _held[name]
        else:
            root.mkdir(parents=True, exist_ok=True)
            opened, count = _lock_file(root), 0
        _held[name] = opened, count + 1


def release(root: Path) -> None:
    """Undo one call of `hold`; after the last one, free the lock and delete the lock file."""
    name = os.path.realpath(root)
    with _guard:
        opened, count = _held.pop(name)
        if count > 1:
            _held[name] = opened, count - 1
            return
        with contextlib.suppress(OSError):
            (root / LOCK).unlink()  # while it is locked, so that no other process has it
        os.close(opened)


def check_free(root: Path) -> None:
    """Raise BlockingIOError if another process holds the lock of a folder; the message names that process."""
    with _guard:
        if os.path.realpath(root) in _held:
            return
        try:
            opened = _open(root / LOCK, os.O_RDONLY)
        except OSError:
            return  # there is no lock file
        try:
            _try_lock(root, opened)
        finally:
            os.close(opened)


def _lock_file(root: Path) -> int:
    """Create and lock the file `.lock` in a folder, write this process's name into it, and return its descriptor."""
    while True:
        opened = _open(root / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _try_lock(root, opened)
            with contextlib.suppress(FileNotFoundError):  # its owner deleted it after it was opened here
                if os.path.samestat(os.fstat(opened), os.stat(root / LOCK)):
                    break
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)
    _write_owner(opened)
    return opened


def _write_owner(opened: int) -> None:
    started, command = datetime.now(UTC).isoformat(timespec="seconds"), Path(sys.argv[0]).name or "python"
    text = f"{command} (process {os.getpid()} on host {socket.gethostname()}, since {started})"
    with contextlib.suppress(OSError):  # on a full disk the lock works without the name
        os.ftruncate(opened, 0)
        os.pwrite(opened, text.encode(errors="replace"), 0)


def _open(file: Path, flags: int) -> int:
    """Open the lock file; raise OSError if it is a link or a named pipe."""
    opened = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "not a plain file", str(file))
    return opened


def _try_lock(root: Path, opened: int) -> None:
    """Lock an open lock file; raise BlockingIOError if another process has locked it, with the name of that process.

    If the file system has no locks, warn and return.
    """
    for tries in range(_TRIES):
        try:
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tries + 1 == _TRIES:
                break
            time.sleep(_PAUSE)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
                raise
            message = f"{root}: no locks ({error}); see to it that one training alone saves there"
            warnings.warn(message, stacklevel=2)
            return
        else:
            return
    owner = "".join(filter(str.isprintable, os.pread(opened, 300, 0).decode(errors="replace"))) or "another process"
    raise BlockingIOError(f"{root}: {owner} is training into this folder; wait until it ends, or give another folder")


def _forget() -> None:
    """Close the lock files in a forked child process, so that it does not keep the locks after its parent has ended."""
    for opened, _ in _held.values():
        os.close(opened)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
