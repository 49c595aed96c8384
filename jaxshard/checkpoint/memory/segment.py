"""The memory segment of a process: a file in shared memory with two slots, one of which always has a complete step.

    process-3   header     two lines: a JSON object, and its CRC-32
                slot 0     record, block, block, ...
                slot 1     record, block, block, ...

The header lists the arrays and blocks (shards); it is written once. To write a slot, first clear its record, then copy
all blocks, then write the record: two lines as in the header, with the step, the name of the training run, and the
CRC-32 of every block. So a process that is killed meanwhile leaves one slot without a record and the other slot
unchanged. Nothing is flushed to disk: the file survives the process, but not the machine.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxshard.checkpoint.checksums import Damaged
from jaxshard.storage.strict_json import decode_object

FORMAT = 1
SLOTS = 2
MOST_DATA = 1 << 16
"""The largest number of bytes of the position of the data in a record, as JSON."""
_PAGE, _LINE = 4096, 64
_LARGEST_HEADER = 1 << 28
_FEW = 1 << 22
"""Fewer bytes than this are copied by the calling thread, since starting threads would take as long."""
_THREADS = 8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Header(NamedTuple):
    """The header of a segment (a process's file in shared memory), which lists its arrays and blocks (shards).

    Attributes:
      facts: {name: text} of settings that must be the same after a restart: the index of the process, the mesh.
      arrays: {path: how the array is stored, as text} of every array of the run.
      blocks: {name: number of bytes} of every block, in their order in a slot.
    """

    facts: dict[str, str]
    arrays: dict[str, str]
    blocks: dict[str, int]


class Record(NamedTuple):
    """The record of a slot, which describes the step in it.

    Attributes:
      run: the random name of the training run.
      step: the number of the step.
      saves: how often the training run was copied to memory so far, this copy included.
      data: the position of the data.
      sums: the CRC-32 of every block.
    """

    run: str
    step: int
    saves: int
    data: Any
    sums: list[int]


class Segment:
    """A memory-mapped file with two slots, each for one step; made by `create_segment` and `open_segment`."""

    def __init__(self, file: Path, header: Header, start: int):
        self.file, self.header = file, header
        self._names = {name: number for number, name in enumerate(header.blocks)}
        self._places, self._size = _place_blocks(header)
        self._start = start
        self._memory: Bytes = np.asarray(np.memmap(file, np.uint8, "r+"))
        if len(self._memory) != start + SLOTS * self._size:
            raise Damaged(f"{file}: {len(self._memory)} bytes, {start + SLOTS * self._size} are expected")

    def record(self, slot: int) -> Record | None:
        """Return the record of a slot, which describes its step; None if the slot has no complete step."""
        return _parse_record(self._slot(slot)[: self._places[0]].tobytes(), len(self._names))

    def clear(self, slot: int) -> None:
        """Clear the record of a slot, so that the slot has no step."""
        self._slot(slot)[:_LINE] = 0

    def write(self, slot: int, record: Record, blocks: Sequence[Bytes]) -> None:
        """Write a step into a slot.

        Args:
          slot: the index of the slot. The other slot does not change.
          record: the record, whose `sums` are replaced by the checksums of `blocks`.
          blocks: the bytes of every block, in the order of the header.

        Raises:
          ValueError: the position of the data is too long.
        """
        if (length := len(json.dumps(record.data))) > MOST_DATA:
            raise ValueError(
                f"the position of the data takes {length:,} bytes as JSON, and in memory there is room for "
                f"{MOST_DATA:,}; save a shorter one"
            )
        self.clear(slot)
        memory = self._slot(slot)

        def copy(start: int, block: Bytes) -> int:
            there = memory[start : start + len(block)]
            there[:] = block
            return zlib.crc32(there.data)

        sums = _map(copy, self._size, self._places[:-1], blocks)
        line = json.dumps(record._replace(sums=sums)._asdict()).encode() + b"\n"
        text = line + _checksum_line(line)
        # Write the first byte last: without it the record is invalid.
        memory[1 : len(text)] = np.frombuffer(text, np.uint8)[1:]
        memory[0] = text[0]

    def read(self, slot: int, record: Record, names: Iterable[str]) -> tuple[dict[str, Bytes], list[str]]:
        """Copy blocks out of a slot.

        Args:
          slot: the index of the slot.
          record: the record of the slot.
          names: the names of the blocks; blocks that the segment lacks are skipped.

        Returns:
          ({name: bytes} of intact blocks, names of damaged blocks).
        """
        wanted, memory = [name for name in names if name in self._names], self._slot(slot)

        def copy(name: str, number: int) -> Bytes | None:
            start = self._places[number]
            found = memory[start : start + self.header.blocks[name]].copy()
            return found if zlib.crc32(found.data) == record.sums[number] else None

        numbers = [self._names[name] for name in wanted]
        found = dict(zip(wanted, _map(copy, self._size, wanted, numbers), strict=True))
        intact = {name: x for name, x in found.items() if x is not None}
        return intact, [name for name in wanted if name not in intact]

    def _slot(self, slot: int) -> Bytes:
        start = self._start + slot * self._size
        return self._memory[start : start + self._size]


def create_segment(file: Path, header: Header) -> Segment:
    """Make a segment (file) with two empty slots, and reserve all of its memory; replace an existing file.

    Raises:
      OSError: there is not enough memory; the message says how many bytes are needed and how many are free.
    """
    line = json.dumps({"format": FORMAT} | header._asdict()).encode() + b"\n"
    text = line + _checksum_line(line)
    start = _round_up(len(text), _PAGE)
    size = start + SLOTS * _place_blocks(header)[1]
    file.unlink(missing_ok=True)  # there may be no room for both
    draft = file.with_name(f".{file.name}.draft")
    opened = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _reserve(opened, size)
        os.pwrite(opened, text, 0)
        os.replace(draft, file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        room = os.statvfs(file.parent)
        free = room.f_bavail * room.f_frsize
        problem = (
            f"{file}: two copies of what this process holds of the run take {size:,} bytes of memory, and {free:,} are "
            f"free there; make {file.parent} larger (mount -o remount,size=), or split the run over more processes"
        )
        raise OSError(error.errno, problem) from None
    finally:
        os.close(opened)
    return Segment(file, header, start)


def open_segment(file: Path) -> Segment:
    """Map an existing segment into memory.

    Raises:
      Damaged: the header is damaged, or the file has another size than the header says.
      FileNotFoundError: there is no such file.
    """
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        line, checksum = opened.readline(_LARGEST_HEADER), opened.readline(_PAGE)
    if checksum != _checksum_line(line):
        raise Damaged(f"{file}: the checksum of its header does not fit its bytes")
    try:
        fields = decode_object(line)
        if fields.pop("format") != FORMAT:
            raise Damaged(f"{file}: another version of jaxshard wrote it; delete it")
        header = Header(**fields)
        return Segment(file, header, _round_up(len(line) + len(checksum), _PAGE))
    except (TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{file}: its header is none of a segment: {error}") from error


def _place_blocks(header: Header) -> tuple[list[int], int]:
    """Return (offsets in a slot, size of a slot), in bytes.

    The offsets are the first byte of every block, and after them the end of the last block.
    """
    starts = [_round_up(MOST_DATA + _PAGE + 12 * len(header.blocks), _PAGE)]
    for size in header.blocks.values():
        starts.append(_round_up(starts[-1] + size, _LINE))
    return starts, _round_up(starts[-1], _PAGE)


def _map(fn: Callable[..., Any], size: int, *columns: Sequence[Any]) -> list[Any]:
    """Return `[fn(*row) for row in zip(*columns)]`, computed in threads if a slot has many bytes (`size`).

    Threads help because copies and checksums release the GIL.
    """
    if size < _FEW:
        return [fn(*row) for row in zip(*columns, strict=True)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(fn, *columns))


def _reserve(opened: int, size: int) -> None:
    """Allocate the memory of a file now, because a later write could die by SIGBUS if memory runs out."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(opened, 0, size)
    else:
        os.truncate(opened, size)


def _parse_record(text: bytes, blocks: int) -> Record | None:
    line, _, rest = text.partition(b"\n")
    line += b"\n"
    if not rest.startswith(_checksum_line(line)):
        return None
    record = Record(**json.loads(line))
    return record if len(record.sums) == blocks else None


def _checksum_line(line: bytes) -> bytes:
    return b"crc32 %08x\n" % zlib.crc32(line)


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple
