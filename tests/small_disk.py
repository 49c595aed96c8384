"""A file system of its own for a test: it really fills up and really is read-only, for root and for C++ too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system in memory; `folder` lies in it."""

    def __init__(self, root: Path):
        self._root, self._ballast = root, root / "ballast"
        self.folder = root / "run"

    def leave(self, free: int) -> None:
        """Fills the disk up to so many free bytes, in whole pages."""
        self.empty()
        size = os.statvfs(self._root).f_bavail * os.statvfs(self._root).f_frsize - free
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def empty(self) -> None:
        """Takes away what filled it."""
        self._ballast.unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written, by anybody."""
        _mount("-o", "remount,ro", self._root)
        try:
            yield
        finally:
            _mount("-o", "remount,rw", self._root)


@contextmanager
def small_disk(root: Path, size: int) -> Iterator[Disk]:
    """A disk of `size` bytes at a new folder; the test is skipped where nothing may be mounted."""
    root.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "none", root)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
