"""Checksums of the files of a step: made when it is saved, compared when it is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxshard.checkpoint.manifest import NAME, Manifest, Segment, read
from jaxshard.checkpoint.store import ARRAYS, Extent

_BLOCK = 1 << 22


class Damaged(ValueError):
    """A step whose files are not those that were saved."""


def segments_of(file: Path, extents: Sequence[Extent]) -> tuple[Segment, ...]:
    """Checksums of a whole file, which is on disk afterwards: one for every extent, and for the bytes between them."""
    segments = []
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        for length, array in _cover(size, extents):
            segments.append(Segment(length, _crc32(opened, length)[1], array))
        os.fsync(opened.fileno())
    return tuple(segments)


def files_of(folder: Path) -> list[str]:
    """The files of a step's folder but its manifest, by their names relative to it, in order."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for name in (path.relative_to(folder).as_posix() for path in found) if name != NAME)


def damage(folder: Path) -> list[str]:
    """Everything that is wrong with a step, a line each that begins with the file's name; none if it is intact."""
    manifest, problems = opened(folder)
    return problems if manifest is None else compare(folder, manifest)


def opened(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of a step, or what is wrong with it."""
    try:
        return read(folder), []
    except FileNotFoundError:
        return None, [f"{folder / NAME}: missing: the save was interrupted, or the file was deleted"]
    except ValueError as error:
        return None, [str(error)]


def compare(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[str]:
    """What differs between the files of a step and its manifest; every `parts`-th file from `part` on is read."""
    problems = compare_names(folder, manifest)
    for name in sorted({*manifest.files} & {*files_of(folder)})[part::parts]:
        problems += _compare_file(folder, manifest, name)
    return problems


def compare_names(folder: Path, manifest: Manifest) -> list[str]:
    """Which files of a step are missing or were added; none is read."""
    there, expected = files_of(folder), manifest.files
    added = [f"{folder / name}: not in the manifest: it was added later" for name in there if name not in expected]
    gone = [name for name in sorted(expected) if name not in there]
    return added + [f"{folder / name}: missing; {_touched(manifest, name, expected[name])}" for name in gone]


def _compare_file(folder: Path, manifest: Manifest, name: str) -> list[str]:
    segments, file = manifest.files[name], folder / name
    if not file.is_file() or file.is_symlink():
        return [f"{file}: not a plain file"]
    try:
        size, wrong = _wrong(file, segments)
    except OSError as error:
        return [f"{file}: can't be read: {error.strerror}; {_touched(manifest, name, segments)}"]
    expected = sum(segment.size for segment in segments)
    if size != expected:
        return [f"{file}: {size} bytes, {expected} were saved; {_touched(manifest, name, wrong)}"]
    if wrong:
        return [f"{file}: its bytes are not those that were saved; {_touched(manifest, name, wrong)}"]
    return []


def _wrong(file: Path, segments: Sequence[Segment]) -> tuple[int, list[Segment]]:
    """How long a file is, and the segments that are not as they were saved."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        return size, [one for one in segments if _crc32(opened, one.size) != (one.size, one.crc32)]


def _touched(manifest: Manifest, name: str, segments: Sequence[Segment]) -> str:
    """Which arrays have bytes in these segments of a file."""
    arrays = sorted({segment.array for segment in segments if segment.array is not None})
    if arrays:
        return "arrays: " + ", ".join(manifest.arrays[array].path for array in arrays)
    if any(segment.array is not None for segment in manifest.files[name]):
        return "no array lies in those bytes"
    return "all arrays are found through it" if name.startswith(f"{ARRAYS}/") else "no array lies in it"


def _cover(size: int, extents: Sequence[Extent]) -> Iterator[tuple[int, int | None]]:
    """(length, array) of the extents and of the gaps around them, which together cover the file."""
    at = 0
    for extent in sorted(extents):
        if extent.start < at or extent.start + extent.size > size:
            continue  # shared or outside: the gap covers it
        if extent.start > at:
            yield extent.start - at, None
        yield extent.size, extent.array
        at = extent.start + extent.size
    if size > at or size == 0:
        yield size - at, None


def _crc32(opened: BinaryIO, size: int) -> tuple[int, int]:
    """(how many bytes could be read, their crc32) of the next bytes of a file."""
    crc = done = 0
    while done < size and (block := opened.read(min(_BLOCK, size - done))):
        crc, done = zlib.crc32(block, crc), done + len(block)
    return done, crc
