"""The manifest of a step: what was saved, how it was made, and a checksum for every byte; it commits the step.

Two lines. The first is one JSON object without line breaks, the second "crc32 " with eight hexadecimal digits over the
first one, its line break included. What the object holds may change with its "format"; these two lines do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

FORMAT = 1
NAME = "manifest.json"


class Saved(NamedTuple):
    """One array in model order, without padding; `dtype` is "key<...>" for random keys, saved as their words."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Segment(NamedTuple):
    """So many bytes of a file, their crc32, and which of the arrays they are a part of; None for none."""

    size: int
    crc32: int
    array: int | None


class Manifest(NamedTuple):
    """A step: its arrays, the segments that cover each of its files, the caller's data position, how it was made."""

    step: int
    arrays: tuple[Saved, ...]
    files: dict[str, tuple[Segment, ...]]
    data: Any
    made: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(segment.size for segments in self.files.values() for segment in segments)


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as its file holds it."""
    fields = manifest._asdict() | {"arrays": [array._asdict() for array in manifest.arrays]}
    line = json.dumps({"format": FORMAT} | fields, allow_nan=False).encode() + b"\n"
    return line + _seal(line)


def from_bytes(raw: bytes) -> Manifest:
    """The manifest in the bytes of a file.

    Raises:
      ValueError: one byte of it differs from what was written, it has a newer format, or it holds something else.
    """
    end = raw.find(b"\n") + 1
    line, seal = raw[:end], raw[end:]
    if not line or seal != _seal(line):
        raise ValueError("its checksum does not fit its bytes: the file was damaged or cut off")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("it holds no JSON object") from error
    if not isinstance(fields, dict) or not _is_count(fields.get("format")):
        raise ValueError("it is not the manifest of a checkpoint")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"it has format {fields['format']}, and this version of jaxshard reads format {FORMAT}; update jaxshard"
        )
    return _parse(fields)


def read(folder: Path) -> Manifest:
    """The manifest of a step's folder.

    Raises:
      ValueError: as `from_bytes`, with the file's name; or it can't be read, or belongs to another step than the
        folder's name says.
      FileNotFoundError: the step is not complete.
    """
    file = folder / NAME
    try:
        manifest = from_bytes(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if folder.name != str(manifest.step):
        raise ValueError(f"{file}: it belongs to step {manifest.step}, not {folder.name}; the folder was renamed")
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest into a step's folder: afterwards the step exists, and before that it does not."""
    write_file(folder / NAME, to_bytes(manifest))


def write_file(file: Path, content: bytes) -> None:
    """Writes a file that is there with all of its content or not at all, also after a power cut."""
    draft = file.with_name(file.name + ".draft")
    with draft.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.rename(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a power cut."""
    with contextlib.suppress(OSError):  # some file systems have no folders to flush
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _seal(line: bytes) -> bytes:
    return b"crc32 %08x\n" % zlib.crc32(line)


def _parse(fields: dict[str, Any]) -> Manifest:
    _check(set(fields) == {"format", *Manifest._fields}, "fields", sorted(fields))
    _check(_is_count(fields["step"]), "step", fields["step"])
    _check(isinstance(fields["made"], dict), "made", fields["made"])
    _check(isinstance(fields["files"], dict), "files", fields["files"])
    arrays = _tuple(fields["arrays"], _saved, "arrays")
    _check(len({array.path for array in arrays}) == len(arrays), "arrays", "one path twice")

    def segment(value: Any) -> Segment:
        _check(isinstance(value, list) and len(value) == 3, "segment", value)
        size, crc, array = value
        known = array is None or (_is_count(array) and array < len(arrays))
        _check(_is_count(size) and _is_count(crc) and crc < 2**32 and known, "segment", value)
        return Segment(size, crc, array)

    files = {name: _tuple(segments, segment, "segments") for name, segments in fields["files"].items()}
    for name in files:
        _check(_is_inside(name), "file name", name)
    return Manifest(fields["step"], arrays, files, fields["data"], fields["made"])


def _saved(value: Any) -> Saved:
    _check(isinstance(value, dict) and set(value) == set(Saved._fields), "array", value)
    path, dtype = value["path"], value["dtype"]
    _check(isinstance(path, str) and path != "" and isinstance(dtype, str) and dtype != "", "array", value)
    return Saved(path, _tuple(value["shape"], _size, "shape"), dtype)


def _size(value: Any) -> int:
    _check(_is_count(value), "size", value)
    return int(value)


def _tuple(values: Any, parse: Callable[[Any], Any], what: str) -> tuple[Any, ...]:
    _check(isinstance(values, list), what, values)
    return tuple(parse(value) for value in values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_inside(name: str) -> bool:
    """Whether a name stays inside the folder of its step, and is not the manifest itself."""
    path = PurePosixPath(name)
    plain = path.as_posix() == name and "\0" not in name and "\\" not in name
    return plain and bool(path.parts) and not path.is_absolute() and ".." not in path.parts and name != NAME


def _check(holds: bool, what: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"the manifest has a wrong {what}: {str(value)[:80]}")
