"""Numbered objects in place of a file that grows, since objects can't be appended to.

Instead of the file "log.jsonl" there are the objects "log.jsonl/000001", "log.jsonl/000002" and so on.
"""

from __future__ import annotations

from jaxshard.storage.paths import AnyPath, ObjectPath


def append_part(folder: ObjectPath, content: bytes, number: int) -> int:
    """Write an object whose name is a number, the first from `number` on that is free; return the next number.

    So nothing is lost if two programs write into one folder. Contents must differ, as in `ObjectPath.replace`.

    Raises:
      OSError: the store can't be reached or refuses.
    """
    while True:
        part = folder / f"{number:06d}"
        found = part.read(0, 0)
        number += 1
        if found.content is None and part.replace(content, found.generation) is not None:
            return number


def next_number(folder: ObjectPath) -> int:
    """Return the number after the largest number of a part in a folder; 1 if there are no parts."""
    return 1 + max((int(name) for name in folder.files() if name.isdecimal()), default=0)


def read_parts(path: AnyPath) -> bytes:
    """Read a file, or the numbered objects that stand for it, in their order.

    Raises:
      FileNotFoundError: there is neither.
      OSError: it can't be read.
    """
    if isinstance(path, ObjectPath):
        names = sorted((name for name in path.files() if name.isdecimal()), key=int)
        if names:
            return b"".join((path / name).read_bytes() for name in names)
    return path.read_bytes()
