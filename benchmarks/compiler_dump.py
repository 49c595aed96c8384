"""What the TPU compiler's dump (`xla_dump_to`) tells of a program, also of one whose compilation was stopped.

`*.after_optimizations.txt` has the program as it will run; `*-buffer-assignment.txt` size and offset of every value in
the allocation of temporaries; `*-live-range.txt` the instructions between which each is live. All of them are written
before code is generated, which takes most of the time. Of several programs in a dump the largest one is read.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.checks.collectives.dump import expand_elements


class Buffer(NamedTuple):
    """A value in the temporaries: live from one instruction of the schedule to another."""

    name: str
    element: str
    bytes: int
    offset: int
    first: int
    last: int
    type: str


def is_assigned(dump: Path) -> bool:
    """True once the compiler has assigned the buffers of a program that is no small helper."""
    file = _largest(dump, "*-buffer-assignment.txt")
    return file is not None and file.stat().st_size > 50_000 and _largest(dump, "*tpu_comp_env.txt") is not None


def memory(dump: Path, count: int = 10) -> dict[str, Any]:
    """Arguments, temporaries and peak in bytes, and the largest buffers at the peak with the operations that make them.

    The peak is arguments and the values that are live at the fullest moment; temporaries are larger where the compiler
    could not place all values without gaps.
    """
    file = _largest(dump, "*-buffer-assignment.txt")
    if file is None:
        return {}
    text, stem = file.read_text(), str(file).removesuffix("-buffer-assignment.txt")
    sizes: Counter[str] = Counter()
    for allocation in _allocations(text):
        head = allocation.split("\n", 1)[0]
        if "color" not in head:  # that of another memory than HBM
            for kind in ("parameter", "preallocated-temp"):
                sizes[kind] += int(re.findall(r"size (\d+)", head)[0]) if kind in head else 0
    buffers = _buffers(text, Path(f"{stem}-live-range.txt").read_text())
    live = sorted(_live(buffers, _fullest_at(buffers)), key=lambda one: -one.bytes)
    program = Path(f"{stem}.txt").read_text()
    lines = []
    for one in live[:count]:
        found = re.search(rf'%{re.escape(one.name)} = .*?op_name="([^"]*)"', program)
        lines.append(
            f"{one.bytes / 1e6:.1f} MB {one.type} {one.name}{one.element} {found[1] if found else ''}".rstrip()
        )
    return {
        "arguments": sizes["parameter"],
        "temporaries": sizes["preallocated-temp"],
        "peak": sizes["parameter"] + _bytes_of(live),
        "largest": lines,
    }


def program_text(dump: Path) -> str:
    """The program, as `compiled.as_text()` would print it; estimated cycles are in it once there is code."""
    file = _largest(dump, "*.after_codegen.txt") or _largest(dump, "*after_optimizations.txt")
    return "" if file is None else expand_elements(file.read_text())


def _largest(dump: Path, pattern: str) -> Path | None:
    return max(dump.glob(pattern), key=lambda file: file.stat().st_size, default=None)


def _allocations(text: str) -> list[str]:
    return re.split(r"\nallocation ", text.split("\n\nTotal bytes used")[0])[1:]


def _buffers(assignment: str, ranges: str) -> list[Buffer]:
    live = {
        (found[1], found[2]): (int(found[3]), int(found[4]))
        for found in re.finditer(
            r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$",
            ranges.split("BufferLiveRange:")[1].split("Live ranges at")[0],
            re.MULTILINE,
        )
    }
    buffers = []
    for allocation in _allocations(assignment):
        head = allocation.split("\n", 1)[0]
        if "preallocated-temp" in head and "color" not in head:
            for found in re.finditer(
                r"value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\): (\S+)", allocation
            ):
                key = (found[1], found[2] or "{}")
                if key in live:
                    buffers.append(Buffer(*key, int(found[3]), int(found[4]), *live[key], found[5]))
    return buffers


def _fullest_at(buffers: list[Buffer]) -> int:
    """The instruction at which most bytes are live."""
    return max({one.first for one in buffers}, key=lambda at: _bytes_of(_live(buffers, at)), default=0)


def _live(buffers: list[Buffer], at: int) -> list[Buffer]:
    return [one for one in buffers if one.first <= at <= one.last]


def _bytes_of(live: list[Buffer]) -> int:
    """The bytes that buffers cover together; several values may share their place."""
    total = end = 0
    for one in sorted(live, key=lambda one: one.offset):
        total += max(0, one.offset + one.bytes - max(end, one.offset))
        end = max(end, one.offset + one.bytes)
    return total
