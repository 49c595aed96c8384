"""Checksums of the files of a saved step: computed when the step is saved, compared when it is read.

A file is divided into segments with a checksum each: the byte ranges of arrays, and the gaps between them. So a wrong
checksum tells which file is damaged, and which arrays in it.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from jaxshard.checkpoint.manifest import ARRAYS, MANIFEST, Manifest, SavedArray, Segment, read_manifest
from jaxshard.checkpoint.store import Extent, find_arrays, find_unreadable
from jaxshard.storage.paths import AnyPath, ObjectPath

_BLOCK = 1 << 22
"""The number of bytes that a thread reads at once."""
_THREADS = 8
"""The largest number of threads that read a file: more are no faster, and training needs the cores too."""


class Damaged(ValueError):
    """Raised if files of a saved step are missing, were added, or differ from the bytes that were written.

    Example:
        js.save("run", run, layout)
        try:
            run = js.restore("run", layout)
        except js.Damaged as error:
            print(error)    # the file that differs
    """


def checksum_file(file: Path, extents: Sequence[Extent]) -> tuple[Segment, ...]:
    """Compute the CRC-32 of each segment of a file, and flush the file to disk.

    Args:
      file: the file, completely written.
      extents: the byte ranges of arrays in the file.

    Returns:
      The segments, which cover the file without gaps: one for each extent, and one for the bytes between two extents.
    """
    with file.open("rb") as opened:
        cover = list(_cover_file(os.fstat(opened.fileno()).st_size, extents))
        found = _checksum_parts(_reader(opened), [length for length, _ in cover])
        os.fsync(opened.fileno())
    return tuple(Segment(length, crc, array) for (length, array), (_, crc) in zip(cover, found, strict=True))


def list_files(folder: AnyPath) -> list[str]:
    """Return the sorted relative paths of all files and links in a step's folder, without the manifest."""
    if isinstance(folder, ObjectPath):
        return [name for name in folder.files() if name != MANIFEST]
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for name in (path.relative_to(folder).as_posix() for path in found) if name != MANIFEST)


def find_damage(folder: AnyPath) -> list[str]:
    """Compare every file of a step with its checksum; return a line for each problem, beginning with a file's path."""
    manifest, problems = try_manifest(folder)
    return problems if manifest is None else compare_step(folder, manifest)


def try_manifest(folder: AnyPath) -> tuple[Manifest | None, list[str]]:
    """Read the manifest of a step; return (manifest, []), or (None, [error message]) if it can't be read."""
    try:
        return read_manifest(folder), []
    except FileNotFoundError:
        return None, [f"{folder / MANIFEST}: missing: the save was interrupted, or the file was deleted"]
    except ValueError as error:
        return None, [str(error)]


def compare_step(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Compare the files of a step with the checksums in its manifest; return a line for each difference.

    If the files are intact, also compare the shapes and dtypes in the manifest with those on disk.
    """
    return compare_files(folder, manifest) or compare_arrays(folder, manifest)


def compare_files(folder: AnyPath, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[str]:
    """Compare the names and checksums of a step's files with its manifest.

    Several processes can share the work. Each reads the files `part`, `part + parts`, `part + 2 * parts` and so on, by
    index in the sorted list. The names of all files are compared in every process.

    Args:
      folder: the folder of the step.
      manifest: the manifest of the step.
      part: the index of this process.
      parts: the number of processes; 1 to read all files.

    Returns:
      The differences, each a line that begins with the file's path and ends with the arrays in the damaged bytes.
    """
    problems = compare_file_names(folder, manifest)
    if _lists_too_much(manifest):
        return problems  # do not read terabytes of a sparse file
    if manifest.generations is not None:
        return problems + _compare_objects(folder, manifest, part, parts)
    plain = (name for name in list_files(folder) if name in manifest.files and _is_plain(folder / name))
    for name in sorted(plain)[part::parts]:
        problems += _compare_file(folder, manifest, name)
    return problems


def compare_arrays(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Compare the shapes and dtypes in the manifest of a step with those of the arrays on disk.

    Reads only the index of the arrays, so check first that the files are intact.

    Returns:
      The differences, each a line that begins with the path of the manifest and the name of the array.
    """
    try:
        written = find_arrays(folder / manifest.folder)
    except ValueError as error:
        return [f"{folder / manifest.folder}: {error}"]
    listed = {array.path: array for array in manifest.arrays if 0 not in array.shape}  # empty ones are in no file
    problems = [f"{name}: missing, it lists {array}" for name, array in listed.items() if name not in written]
    problems += [f"{name}: not in it, and written as {_text(*written[name])}" for name in written if name not in listed]
    problems += [
        f"{name}: it lists {array}, and written is {_text(*written[name])}"
        for name, array in listed.items()
        if name in written and not _was_written_as(array, *written[name])
    ]
    return [f"{folder / MANIFEST}: {problem}" for problem in problems]


def _text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{list(shape)}"


def _was_written_as(array: SavedArray, shape: tuple[int, ...], dtype: str) -> bool:
    """Return True if an array has on disk the shape and dtype that the manifest lists.

    Random keys are on disk as uint32 words, which have one more dimension.
    """
    if array.dtype.startswith("key<"):
        return dtype == "uint32" and shape[:-1] == array.shape
    return (dtype, shape) == (array.dtype, array.shape)


def compare_file_names(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Return a line for each file of a step that is missing, was added or is not a plain file; no file is read."""
    there, expected = list_files(folder), manifest.files
    if isinstance(folder, ObjectPath):  # others may be those of a training that slept while this step was saved
        there = [name for name in there if name.startswith(f"{manifest.folder}/")]
    added = [f"{folder / name}: not in the manifest: it was added later" for name in there if name not in expected]
    if isinstance(folder, Path):
        known = (name for name in there if name in expected)
        added += [f"{folder / name}: not a plain file" for name in known if not _is_plain(folder / name)]
    if _lists_too_much(manifest):
        added.append(f"{folder / MANIFEST}: it lists files of {manifest.size} bytes, far more than its arrays need")
    gone = [name for name in sorted(expected) if name not in there]
    return added + [f"{folder / name}: missing; {_describe_arrays(manifest, name, expected[name])}" for name in gone]


def compare_sizes(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Return a line for each plain file of a step whose size differs from the manifest; no file is read."""
    if manifest.generations is not None or isinstance(folder, ObjectPath):
        return []  # an object store tells no sizes
    saved = {name: sum(segment.size for segment in segments) for name, segments in manifest.files.items()}
    plain = [name for name in list_files(folder) if name in saved and _is_plain(folder / name)]
    there = {name: (folder / name).stat().st_size for name in plain}
    return [
        f"{folder / name}: {size} bytes, {saved[name]} were saved"
        for name, size in there.items()
        if size != saved[name]
    ]


def _lists_too_much(manifest: Manifest) -> bool:
    """Return True if a manifest lists far more bytes than its arrays can need: 16 bytes for each element.

    A wrong manifest could list a sparse file of many terabytes, which would take days to read.
    """
    elements = sum(math.prod(array.shape) for array in manifest.arrays)
    return manifest.size > 16 * elements + (1 << 16) * len(manifest.arrays) + (1 << 20) * len(manifest.files) + (
        1 << 26
    )


def _compare_objects(folder: AnyPath, manifest: Manifest, part: int, parts: int) -> list[str]:
    """Compare a share of a step that was saved into an object store; return a line for each difference.

    In the store, generations are compared and no object is read. In a copy on a disk, every array is read: TensorStore
    compares the checksum of each chunk.
    """
    if not isinstance(folder, ObjectPath):
        names = sorted(array.path for array in manifest.arrays if 0 not in array.shape)[part::parts]
        unreadable = ((name, find_unreadable(folder / manifest.folder, name)) for name in names)
        return [f"{folder / manifest.folder}: arrays: {name}: {why}" for name, why in unreadable if why]
    names, saved = sorted(manifest.files)[part::parts], manifest.generations or {}
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(lambda name: (folder / name).generation().hex(), names))
    return [
        f"{folder / name}: written again since the step was saved, or copied there (then restore with verify=False, "
        "which compares the checksum of each chunk that it reads)"
        for name, generation in zip(names, found, strict=True)
        if generation != saved[name]
    ]


def _is_plain(file: AnyPath) -> bool:
    """Return True for a plain file; False for a link, or for a named pipe, on which a reader could wait forever."""
    return file.is_file() and not file.is_symlink()


def _compare_file(folder: AnyPath, manifest: Manifest, name: str) -> list[str]:
    segments, file = manifest.files[name], folder / name
    sizes = [one.size for one in segments]
    expected = sum(sizes)
    try:
        if isinstance(file, ObjectPath):  # a step that was copied from a disk
            size, found = expected, _checksum_parts(lambda at, count: file.read(at, at + count).content or b"", sizes)
        else:
            with file.open("rb") as opened:
                size, found = os.fstat(opened.fileno()).st_size, _checksum_parts(_reader(opened), sizes)
    except OSError as error:
        return [f"{file}: can't be read: {error.strerror or error}; {_describe_arrays(manifest, name, segments)}"]
    changed = [one for one, part in zip(segments, found, strict=True) if part != (one.size, one.crc32)]
    if size == expected and not changed:
        return []
    wrong = "its bytes are not those that were saved" if size == expected else f"{size} bytes, {expected} were saved"
    return [f"{file}: {wrong}; {_describe_arrays(manifest, name, changed)}"]


def _describe_arrays(manifest: Manifest, name: str, segments: Sequence[Segment]) -> str:
    """Return the end of an error message, which names the arrays with bytes in these segments of the file `name`."""
    arrays = sorted({segment.array for segment in segments if segment.array is not None})
    if arrays:
        return "arrays: " + ", ".join(manifest.arrays[array].path for array in arrays)
    if any(segment.array is not None for segment in manifest.files[name]):
        return "no array lies in those bytes"
    return "all arrays are found through it" if name.startswith(f"{ARRAYS}/") else "no array lies in it"


def _cover_file(size: int, extents: Sequence[Extent]) -> Iterator[tuple[int, int | None]]:
    """Divide a file of `size` bytes: yield (length, array index) for each extent, and (length, None) for each gap.

    Example: of a file of 100 bytes with Extent(start=10, size=30, array=2):  (10, None), (30, 2), (60, None).
    """
    at = 0
    for extent in sorted(extents):
        if extent.start < at or extent.start + extent.size > size:
            continue  # it overlaps another extent or is outside of the file: a gap covers its bytes
        if extent.start > at:
            yield extent.start - at, None
        yield extent.size, extent.array
        at = extent.start + extent.size
    if size > at or size == 0:
        yield size - at, None


def _reader(opened: BinaryIO) -> Callable[[int, int], bytes]:
    """Return a function that reads bytes of a file from a position on; the file's own position does not move."""
    return lambda at, count: os.pread(opened.fileno(), count, at)


def _checksum_parts(read: Callable[[int, int], bytes], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Compute the checksums of consecutive parts of a file, in threads.

    Args:
      read: `read(position, count)` returns that many bytes of the file, or fewer at its end.
      sizes: the number of bytes of each part; the first part begins at the file's start.

    Returns:
      (number of bytes read, CRC-32) of each part. The number is smaller than the part's size if the file ends early.
    """
    starts = accumulate(sizes, initial=0)
    # zlib and reads release the GIL, so that threads use all cores.
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(partial(_checksum_part, read), starts, sizes))


def _checksum_part(read: Callable[[int, int], bytes], start: int, size: int) -> tuple[int, int]:
    """Return (number of bytes read, CRC-32) of `size` bytes from `start`."""
    crc = done = 0
    while done < size and (block := read(start + done, min(_BLOCK, size - done))):
        crc, done = zlib.crc32(block, crc), done + len(block)
    return done, crc
