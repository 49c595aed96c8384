"""Read objects in ranges of bytes, and copy them into a cache on this machine for what reads files only.

The cache is the folder `jaxshard/objects` in $XDG_CACHE_HOME, or in ~/.cache. The name of a copy has a hash of the
address and of the generations of its objects, so a changed object gets another copy. Copies stay until somebody deletes
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jaxshard.storage.failures import OutOfRange
from jaxshard.storage.paths import AnyPath, ObjectPath, Stored

CHUNK = 1 << 26
"""The largest number of bytes to read by one request."""
_AT_ONCE = 16
"""The number of objects of a folder that are read at the same time."""


def read_range(file: ObjectPath, start: int, end: int) -> Stored:
    """Read the bytes of an object from `start` to `end` - 1, or up to the end of the object if it is shorter.

    Raises:
      FileNotFoundError: there is no such object.
      OSError: the store can't be reached or refuses.
    """
    try:
        found = file.read(start, end)
    except OutOfRange:  # which does not tell where the object ends
        try:
            found = file.read(start)
        except OutOfRange:
            found = file.read(0, 0)
    if found.content is None:
        raise FileNotFoundError(f"{file}: there is no such object")
    return found


def ends_at(file: ObjectPath, size: int) -> bool:
    """Return True if an object has this number of bytes, which TensorStore does not tell."""
    return bool(size) and len(read_range(file, size - 1, size + 1).content or b"") == 1


def local_copy(path: AnyPath, only: tuple[str, ...] = ()) -> Path:
    """Return a file or folder on this machine with the content of a path; objects are copied into the cache.

    Several processes may call this at once; one of them copies, the others wait for it.

    Args:
      path: a file or a folder, or an address. A path of a mounted file system is returned as it is.
      only: patterns of the names of the objects to copy from a folder, such as "*.json" for those of the folder itself;
        by default all objects of the folder and of the folders in it.

    Raises:
      FileNotFoundError: there is no such object, and none in such a folder.
      OSError: the store can't be reached or refuses, or the cache can't be written.

    Example:
        text = local_copy(as_path("s3://bucket/corpus.txt")).read_text()
    """
    if isinstance(path, Path):
        return path
    generations = _find_generations(path, only)
    key = hashlib.sha256(json.dumps([path.spec(), generations], sort_keys=True).encode()).hexdigest()[:32]
    copy = _cache() / key / path.name
    if not copy.exists():
        copy.parent.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.parent.with_suffix(".lock")):
            if not copy.exists():
                _copy(path, generations, copy)
    return copy


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxshard" / "objects"


def _find_generations(path: ObjectPath, only: tuple[str, ...]) -> dict[str, str]:
    """Return {name in the folder: generation in hexadecimal} of the objects to copy; for an object the name is ""."""
    if path.is_file():
        return {"": path.generation().hex()}
    names = [name for name in path.files() if not name.endswith("/")]  # which stand for empty folders
    if only:
        names = [name for name in names if any(_fits(name, pattern) for pattern in only)]
    if not names:
        raise FileNotFoundError(f"{path}: there is no such object, and none in a folder of this name")
    if wrong := [name for name in names if {"", ".", ".."} & set(name.split("/"))]:
        raise OSError(f"{path / wrong[0]}: files can't have this name; rename the object")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda name: (path / name).generation().hex(), names)
        return dict(zip(names, found, strict=True))


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _copy(path: ObjectPath, generations: dict[str, str], copy: Path) -> None:
    """Copy an object, or the objects of a folder, so that `copy` is complete or does not exist."""
    made = Path(tempfile.mkdtemp(prefix=".", dir=copy.parent.parent))
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda name: _copy_object(path, name, generations[name], made / copy.name), generations):
                pass
        try:
            os.rename(made, copy.parent)
        except OSError:
            if not copy.exists():  # else another process was faster, where files have no locks
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _copy_object(path: ObjectPath, name: str, generation: str, copy: Path) -> None:
    source, target = (path / name, copy / name) if name else (path, copy)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for start in itertools.count(0, CHUNK):
            found = read_range(source, start, start + CHUNK)
            if found.generation.hex() != generation:
                raise OSError(f"{source}: it was changed while it was read; read it again")
            content = found.content or b""
            file.write(content)
            if len(content) < CHUNK:
                break
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[Any]:
    """Return a context that only one process of this machine enters at a time."""
    with file.open("w") as opened:
        with contextlib.suppress(OSError):  # some file systems have no locks: then several processes copy
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
