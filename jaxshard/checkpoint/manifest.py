"""The manifest of a saved step: the arrays, how they were made, and a checksum for every byte of the step's files.

It is written last, so a step with a manifest is complete. It has two lines: a JSON object, and the CRC-32 of the first
line with its line break:

    {"format": 1, "step": 1000, "arrays": [{"path": "params/w", "shape": [64, 48], "dtype": "float32"}, ...],
     "files": {"arrays/state/d/0a1b": [[12288, 912343, 0], [224, 71230, null]], ...}, "data": null, "made": {...}}
    crc32 7d3c9a01

(here the JSON is wrapped). Each file is a sequence of segments [bytes, CRC-32, index in "arrays" or null]. For a model
of `js.lora` the field "base" has checksums of the frozen base weights, which are not saved. In an object store the
files have no segments: "generations" has the store's generation of each object (an ETag), and "epoch" the number of the
lease under which they were written. The object's fields may change with its "format"; the two lines and the checksum do
not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from jaxshard.storage.paths import AnyPath, ObjectPath
from jaxshard.storage.strict_json import decode_object, read_plain_file

FORMAT = 1
_KEYED = {"sha256", "hmac"}
"""Fields that earlier versions wrote for a step saved with a secret key; ignored, since the checksums suffice."""
MANIFEST = "manifest.json"
"""The manifest's file name in the folder of a step."""
ARRAYS = "arrays"
"""The name of the folder with the arrays in the folder of a step; in an object store it ends with the epoch."""


class SavedArray(NamedTuple):
    """The name, logical shape and dtype of a saved array.

    The dtype of random keys is "key<...>", although the file has their uint32 words.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def bits(self) -> int:
        """The number of bits of an element, from the dtype's name: 16 of "bfloat16"; 8 of "bool"."""
        found = re.search(r"\d+", self.dtype)
        return 8 if found is None else int(found[0])


class Segment(NamedTuple):
    """A byte range of a file, which begins where the previous segment ends.

    Attributes:
      size: the number of bytes.
      crc32: the CRC-32 of the bytes.
      array: the index in `Manifest.arrays` of the array that has these bytes; None if no array has them.
    """

    size: int
    crc32: int
    array: int | None


class Manifest(NamedTuple):
    """The description of a saved step, without its arrays.

    Attributes:
      step: the number of the step.
      arrays: all saved arrays of the run.
      files: {path relative to the step's folder: segments of the file} of all files but the manifest.
      data: the position of the data, as the caller of `js.save` passed it.
      made: versions, mesh, layout and time of the save, for people to read.
      base: {path: checksum} of the frozen base weights of `js.lora`, which are not saved; None if there are none.
      epoch: the number of the lease under which an object store's step was written; None for a step in files.
      generations: {path: generation} of each object, in hexadecimal; None for a step in files.
    """

    step: int
    arrays: tuple[SavedArray, ...]
    files: dict[str, tuple[Segment, ...]]
    data: Any
    made: dict[str, Any]
    base: dict[str, str] | None = None
    epoch: int | None = None
    generations: dict[str, str] | None = None

    @property
    def size(self) -> int:
        """The total number of bytes of all files but the manifest; for an object store, of all arrays."""
        if self.generations is not None:
            return sum(math.prod(array.shape) * array.bits for array in self.arrays) // 8
        return sum(segment.size for segments in self.files.values() for segment in segments)

    @property
    def folder(self) -> str:
        """The name of the folder with the arrays, in the folder of the step."""
        return arrays_folder(self.epoch)


def arrays_folder(epoch: int | None) -> str:
    """Return the name of the folder with a step's arrays: "arrays", or "arrays-7" in an object store."""
    return ARRAYS if epoch is None else f"{ARRAYS}-{epoch}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as the bytes of its file: a line of JSON, and a line with the CRC-32 of the first."""
    fields = {name: value for name, value in manifest._asdict().items() if value is not None or name == "data"}
    fields |= {"arrays": [array._asdict() for array in manifest.arrays]}
    line = json.dumps({"format": FORMAT} | fields, allow_nan=False).encode() + b"\n"
    return line + _checksum_line(line)


def decode_manifest(raw: bytes) -> Manifest:
    """Decode the bytes of a manifest's file.

    Raises:
      ValueError: the checksum is wrong, the format is newer, or the bytes are not a manifest.
    """
    end = raw.find(b"\n") + 1
    line, checksum = raw[:end], raw[end:]
    if not line or checksum != _checksum_line(line):
        raise ValueError("its checksum does not fit its bytes: the file was damaged or cut off")
    try:
        fields = decode_object(line)
    except ValueError as error:
        raise ValueError(f"it holds no JSON object: {error}") from error
    if not _is_count(fields.get("format")):
        raise ValueError("it is not the manifest of a checkpoint")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"it has format {fields['format']}, and this version of jaxshard reads format {FORMAT}; update jaxshard"
        )
    return _parse(fields)


def try_decode(raw: bytes) -> Manifest | None:
    """Decode the bytes of a manifest's file; return None if they are damaged."""
    try:
        return decode_manifest(raw)
    except ValueError:
        return None


def read_manifest(folder: AnyPath) -> Manifest:
    """Read the manifest of a step's folder.

    Raises:
      OSError: an object store can't be reached or refuses.
      ValueError: the file can't be decoded or read, or belongs to another step than the folder's name says. The
        message names the file.
      FileNotFoundError: there is no manifest, so the step is not complete.
    """
    file = folder / MANIFEST
    try:
        manifest = decode_manifest(read_plain_file(file))
    except FileNotFoundError:
        raise
    except OSError as error:
        if isinstance(file, ObjectPath):
            raise  # a store that does not answer is no damage
        raise ValueError(f"{file}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if folder.name != str(manifest.step):
        raise ValueError(f"{file}: it belongs to step {manifest.step}, not {folder.name}; the folder was renamed")
    return manifest


def write_manifest(file: Path, manifest: Manifest) -> None:
    """Write a manifest to a file; a step is complete when its folder has a manifest with the name `MANIFEST`."""
    write_atomically(file, encode_manifest(manifest))


def write_atomically(file: AnyPath, content: bytes) -> None:
    """Write a file so that its complete content is on disk or the file does not exist, even after a power failure."""
    if isinstance(file, ObjectPath):
        file.write_bytes(content)
        return
    draft = file.with_name(file.name + ".draft")
    with draft.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.rename(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk, so that new and renamed files survive a power failure."""
    with contextlib.suppress(OSError):  # some file systems have no folders to flush
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _checksum_line(line: bytes) -> bytes:
    return b"crc32 %08x\n" % zlib.crc32(line)


def _parse(fields: dict[str, Any]) -> Manifest:
    wanted = {"format", *Manifest._fields}
    optional = {"base", "epoch", "generations"}
    _check(wanted - optional <= fields.keys() - _KEYED <= wanted, "fields", sorted(fields))
    _check(_is_count(fields["step"]), "step", fields["step"])
    for name, kind in (("arrays", list), ("files", dict), ("made", dict)):
        _check(isinstance(fields[name], kind), name, fields[name])
    arrays = tuple(_parse_array(value) for value in fields["arrays"])
    _check(len({array.path for array in arrays}) == len(arrays), "arrays", "one path twice")
    files = {}
    for name, segments in fields["files"].items():
        _check(_is_inside(name), "file name", name)
        _check(isinstance(segments, list), "segments", segments)
        files[name] = tuple(_parse_segment(value, len(arrays)) for value in segments)
    for name in ("base", "generations"):
        texts = fields.get(name, {})
        _check(isinstance(texts, dict) and all(isinstance(value, str) for value in texts.values()), name, texts)
    epoch, generations = fields.get("epoch"), fields.get("generations")
    _check(epoch is None or _is_count(epoch), "epoch", epoch)
    _check(generations is None or generations.keys() == files.keys(), "generations", sorted(generations or ()))
    _check((epoch is None) == (generations is None), "epoch", epoch)
    made, base = fields["made"], fields.get("base")
    return Manifest(fields["step"], arrays, files, fields["data"], made, base, epoch, generations)


def _parse_array(value: Any) -> SavedArray:
    _check(isinstance(value, dict) and set(value) == set(SavedArray._fields), "array", value)
    path, shape, dtype = value["path"], value["shape"], value["dtype"]
    _check(isinstance(path, str) and path != "" and isinstance(dtype, str) and dtype != "", "array", value)
    _check(isinstance(shape, list) and all(map(_is_count, shape)), "shape", shape)
    return SavedArray(path, tuple(shape), dtype)


def _parse_segment(value: Any, arrays: int) -> Segment:
    _check(isinstance(value, list) and len(value) == 3, "segment", value)
    size, crc, array = value
    known = array is None or (_is_count(array) and array < arrays)
    _check(_is_count(size) and _is_count(crc) and crc < 2**32 and known, "segment", value)
    return Segment(size, crc, array)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_inside(name: str) -> bool:
    """Return True if a relative path stays inside the folder of its step, and is not the path of the manifest."""
    path = PurePosixPath(name)
    plain = path.as_posix() == name and "\0" not in name and "\\" not in name
    return plain and bool(path.parts) and not path.is_absolute() and ".." not in path.parts and name != MANIFEST


def _check(holds: bool, what: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"the manifest has a wrong {what}: {str(value)[:80]}")
