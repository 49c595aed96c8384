"""`ObjectPath`: a path in an object store, with the methods of `pathlib.Path` that this package uses.

An object store has no folders: a "folder" is the beginning of the names of its objects, up to a slash. So folders need
not be made, and vanish with their last object. Nothing can be renamed or appended to. Instead, an object is written
completely or not at all, and `replace` writes only if nobody else has written since.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.core.file_errors import naming
from jaxshard.core.local_path import check_local
from jaxshard.storage.bucket import SCHEMES, bucket_spec, open_bucket
from jaxshard.storage.failures import naming_object

_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://([^/]+)/?(.*)", re.DOTALL)
_TIMEOUT = 300.0
"""Seconds after which a request for a small object counts as failed, if the server accepts it and never answers."""


class Stored(NamedTuple):
    """The content of an object, and its generation.

    Attributes:
      content: the bytes; None if there is no object.
      generation: what the store calls this state of the object: another one after every change. Also the state "there
        is no object" has a generation.
    """

    content: bytes | None
    generation: bytes


class ObjectPath:
    """A path in an object store, such as s3://bucket/run/1000.

    Args:
      address: the address; it is printed as it is given here.

    Raises:
      ValueError: the address has no bucket.

    Example:
        file = ObjectPath("s3://bucket/run") / "notes.txt"
        file.write_bytes(b"text")
    """

    def __init__(self, address: str):
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise ValueError(f"{address}: no bucket; write an address such as s3://bucket/run")
        self._address = address.rstrip("/")
        self._scheme, self._bucket, self._key = found[1], found[2], found[3].strip("/")

    def __str__(self) -> str:
        return self._address

    def __fspath__(self) -> str:
        return self._address

    def __repr__(self) -> str:
        return f"ObjectPath({self._address!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._address)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self._address}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address; of a bucket alone its name."""
        return self._address.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on, or ""."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return Path(self.name).stem

    @property
    def parent(self) -> ObjectPath:
        """The address without its last part; a bucket is its own parent."""
        return ObjectPath(self._address.rpartition("/")[0]) if self._key else self

    def with_name(self, name: str) -> ObjectPath:
        """Return the address with another last part."""
        return self.parent / name

    def absolute(self) -> ObjectPath:
        """Return this path, since addresses are absolute."""
        return self

    def spec(self) -> dict[str, Any]:
        """Return the TensorStore spec of the key-value store whose keys are the objects in this folder."""
        return bucket_spec(self._scheme, self._bucket) | {"path": f"{self._key}/" if self._key else ""}

    # Reading

    def is_file(self) -> bool:
        """Return True if there is an object of this name."""
        return bool(self._key) and self.read(0, 0).content is not None

    def is_dir(self) -> bool:
        """Return True if there are objects whose names begin with this path and a slash."""
        return any(True for _ in self._keys())

    def exists(self) -> bool:
        """Return True if there is an object of this name, or in this folder."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Return False, since an object store has no links."""
        return False

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield what is in this folder: objects, and folders that have objects."""
        for name in dict.fromkeys(key.partition("/")[0] for key in self._keys()):
            yield self / name

    def files(self) -> list[str]:
        """Return the sorted names of all objects in this folder and the folders in it, relative to this folder."""
        return sorted(self._keys())

    def read(self, start: int = 0, end: int | None = None) -> Stored:
        """Read an object, or its bytes from `start` to `end` - 1.

        Raises:
          OSError: the store can't be reached or refuses.
        """
        part = None if (start, end) == (0, None) else slice(start, end)
        with naming_object(str(self)):
            found = self._store().read(self._key, byte_range=part).result(timeout=_TIMEOUT)
        return Stored(None if found.state == "missing" else found.value, found.stamp.generation)

    def read_bytes(self) -> bytes:
        """Return the content of an object.

        Raises:
          FileNotFoundError: there is no such object.
          OSError: the store can't be reached or refuses.
        """
        content = self.read().content
        if content is None:
            raise FileNotFoundError(f"{self}: there is no such object")
        return content

    def generation(self) -> bytes:
        """Return the generation of an object, which changes with every write; also that of a missing object."""
        return self.read(0, 0).generation

    # Writing

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing, since folders need not be made."""

    def write_bytes(self, content: bytes) -> None:
        """Write an object, completely or not at all, over any earlier one.

        Raises:
          OSError: the store can't be reached or refuses.
        """
        with naming_object(str(self)):
            self._store().write(self._key, content).result()

    def try_to_write(self) -> None:
        """Write and delete a small object in this folder.

        Raises:
          OSError: the bucket does not exist or may not be written, credentials are wrong, or the store does not answer.
        """
        probe = self / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"")
        probe.unlink()

    def replace(self, content: bytes | None, generation: bytes) -> bytes | None:
        """Write or delete (None) an object if it still has a generation; return its new one, or None if it has not.

        A request that is sent again after a lost answer is refused because of its own success. So after a refusal the
        object is read; if its content is the new one, this write has succeeded. Contents must differ between writers.

        Raises:
          OSError: the store can't be reached or refuses for another reason.
        """
        with naming_object(str(self)):
            written = self._store().write(self._key, content, if_equal=generation).result(timeout=_TIMEOUT)
        if written.generation:
            return bytes(written.generation)
        there = self.read()
        return there.generation if there.content == content else None

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Delete an object; a missing one is no error.

        Raises:
          OSError: the store can't be reached or refuses.
        """
        with naming_object(str(self)):
            self._store().write(self._key, None).result(timeout=_TIMEOUT)

    def rmtree(self) -> None:
        """Delete all objects in this folder and the folders in it.

        Raises:
          OSError: the store can't be reached or refuses.
        """
        with naming_object(str(self)):
            self._store().delete_range(self._range()).result()

    def _store(self) -> Any:
        return open_bucket(self._scheme, self._bucket)

    def _range(self) -> Any:
        import tensorstore

        start = f"{self._key}/" if self._key else ""
        end = f"{self._key}0" if self._key else ""  # "0" is the character after "/"
        return tensorstore.KvStore.KeyRange(start, end)

    def _keys(self) -> Iterator[str]:
        skip = len(f"{self._key}/".encode()) if self._key else 0
        with naming_object(str(self)):
            keys = self._store().list(self._range(), strip_prefix_length=skip).result(timeout=_TIMEOUT)
        return (key.decode(errors="replace") for key in keys)


AnyPath = Path | ObjectPath
"""A path in a mounted file system, or in an object store."""


def write_file(file: AnyPath, content: bytes) -> None:
    """Write a file or an object; an OSError names it."""
    with naming(file) if isinstance(file, Path) else contextlib.nullcontext():  # errors of objects have the address
        file.write_bytes(content)


def replace_file(file: AnyPath, content: bytes) -> None:
    """Write a small file so that a reader, also after a kill, finds the old content or the new one.

    Raises:
      OSError: the file can't be written.
    """
    if isinstance(file, ObjectPath):
        file.write_bytes(content)
        return
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with new.open("xb") as opened:  # never through a link that somebody left there
        opened.write(content)
    os.replace(new, file)


def kvstore_spec(folder: AnyPath) -> dict[str, Any]:
    """Return the TensorStore spec of the key-value store whose keys are the names of the files in a folder."""
    return folder.spec() if isinstance(folder, ObjectPath) else {"driver": "file", "path": f"{folder}/"}


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return an `ObjectPath` for an address s3://... or gs://..., and otherwise a `Path`.

    Raises:
      ValueError: the path is an address of another kind, or has no bucket.

    Example:
      >>> as_path("s3://bucket/run/"), as_path("run/a").name
      (ObjectPath('s3://bucket/run'), 'a')
    """
    check_local(path, schemes=SCHEMES)
    text = os.fspath(path)
    return ObjectPath(text) if text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)) else Path(text)
