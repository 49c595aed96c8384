"""Read the memory that a compiler assigned from the dump of a compilation (`xla_dump_to`), even if it was refused.

`*.after_optimizations.txt` has the optimized program; `*-buffer-assignment.txt` the size and offset of every value in
the allocation of temporaries; `*-live-range.txt` the schedule, and the instructions between which each value is live.
The compilers of TPUs and GPUs write all of them before they generate code, which takes most of the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_AFTER = ("*after_buffer_assignment.txt", "*.ir-no-opt.ll")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_STEP = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)
_VALUE = re.compile(r"value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\): (\S+)")


class Value(NamedTuple):
    """A temporary value, live from one instruction of the schedule to another.

    Attributes:
      name: the name of the instruction that makes it.
      element: "{23}" for element 23 of a tuple; "{}" for a value that is not an element of a tuple.
      bytes: its bytes, padding included.
      offset: its offset in the allocation of temporaries.
      first: the index in the schedule of the first instruction at which it is live.
      last: the index in the schedule of the last instruction that reads it.
      type: its type, such as "bf16[4,128]{1,0}".
    """

    name: str
    element: str
    bytes: int
    offset: int
    first: int
    last: int
    type: str


class Assignment(NamedTuple):
    """The memory that the compiler assigned to a program on each device.

    There are two figures. `peak` counts the values that are live at the peak, as `peak_memory_in_bytes` of
    `compiled.memory_analysis()` does. `allocated` counts all reserved bytes, including the gaps between
    temporaries, which are left when a value reuses the memory of a larger one.

    Attributes:
      arguments: bytes of each argument of the program, by its index.
      results: bytes of results that are not written into the memory of an argument, and of constants.
      temporaries: bytes of the allocation of temporaries, gaps included.
      live: the values that are live at the peak, each with the bytes that it adds (several may share memory), the
        largest first.
      moment: the name of the instruction that runs at the peak; "" if nothing is live.
    """

    arguments: dict[int, int]
    results: int
    temporaries: int
    live: tuple[tuple[Value, int], ...]
    moment: str

    @property
    def peak(self) -> int:
        """Bytes that are live at once: arguments, results, and the temporaries that are live at the peak."""
        return sum(self.arguments.values()) + self.results + sum(added for _, added in self.live)

    @property
    def allocated(self) -> int:
        """Bytes that are reserved: arguments, results, and the allocation of temporaries with its gaps."""
        return sum(self.arguments.values()) + self.results + self.temporaries


def read_assignment(folder: Path) -> Assignment | None:
    """Read the memory assigned to the step from a dump; None if the compiler failed before it assigned memory."""
    file = largest(folder, "*-buffer-assignment.txt")
    if file is None:
        return None
    text, ranges = file.read_text(), Path(str(file).replace("-buffer-assignment", "-live-range"))
    arguments: dict[int, int] = {}
    results = temporaries = 0
    values = ""
    for allocation in _allocations(text):
        head = allocation.split("\n", 1)[0]
        if "color" in head:  # an allocation in another memory than HBM
            continue
        size = int(re.findall(r"size (\d+)", head)[0])
        if number := re.search(r"\bparameter (\d+)", head):
            arguments[int(number[1])] = size
        elif "preallocated-temp" in head:
            temporaries += size
            values += allocation
        elif re.search(r"maybe-live-out|constant", head):
            results += size
    schedule = ranges.read_text() if ranges.exists() else ""
    live_values = list(_values(values, schedule))
    moment = _peak_moment(live_values)
    live = sorted(_covered(_live(live_values, moment)), key=lambda found: -found[1])
    steps = {int(number): name for number, name in _STEP.findall(schedule.split("BufferLiveRange:")[0])}
    return Assignment(arguments, results, temporaries, tuple(live), steps.get(moment, ""))


def assignment_of(found: list[Any]) -> Assignment:
    """Restore an `Assignment` that was saved as JSON, which turns tuples into lists and integer keys into strings."""
    arguments, results, temporaries, live, moment = found
    values = tuple((Value(*value), added) for value, added in live)
    return Assignment({int(number): size for number, size in arguments.items()}, results, temporaries, values, moment)


def is_assigned(folder: Path) -> bool:
    """Return True once the dump of a compilation has the complete files about memory, and the program fits.

    The compiler writes the files of a dump one after another. The files about memory are complete when the next file
    exists: for TPUs a second text of the program, for GPUs the first function as LLVM code.
    """
    return any(next(folder.glob(name), None) is not None for name in _AFTER)


def program_text(folder: Path) -> str:
    """Return the optimized HLO of the step in a dump, which has no estimates of cycles; "" if there is none."""
    file = largest(folder, "*after_optimizations.txt")
    return "" if file is None else file.read_text()


def largest(folder: Path, pattern: str) -> Path | None:
    """Return the largest file that matches a pattern: it is about the step, since helper programs are smaller."""
    return max(folder.glob(pattern), key=lambda file: file.stat().st_size, default=None)


def _allocations(text: str) -> list[str]:
    return re.split(r"\n(?=allocation \d)", text.split("\n\nTotal bytes used")[0])[1:]


def _values(allocations: str, schedule: str) -> Iterator[Value]:
    ranges = schedule.partition("BufferLiveRange:")[2].split("Live ranges at")[0]
    live = {(name, element): (int(first), int(last)) for name, element, first, last in _RANGE.findall(ranges)}
    for name, element, size, offset, kind in _VALUE.findall(allocations):
        key = (name, element or "{}")
        if key in live:
            yield Value(*key, int(size), int(offset), *live[key], kind)


def _peak_moment(values: list[Value]) -> int:
    """Return the index in the schedule of the instruction at which the most bytes are live.

    Values may share memory, so the sum of their sizes is only an upper bound of the live bytes. The exact bytes are
    counted at the instruction with the largest bound, then at the next, until no bound is above the largest count.
    """
    changes: Counter[int] = Counter()
    for one in values:
        changes[one.first] += one.bytes
        changes[one.last + 1] -= one.bytes
    sums, total = [], 0
    for at in sorted(changes):
        total += changes[at]
        sums.append((total, at))
    best = peak = 0
    for bound, at in sorted(sums, reverse=True):
        if bound <= best:
            break
        if (size := sum(added for _, added in _covered(_live(values, at)))) > best:
            best, peak = size, at
    return peak


def _live(values: list[Value], at: int) -> list[Value]:
    return [one for one in values if one.first <= at <= one.last]


def _covered(live: list[Value]) -> Iterator[tuple[Value, int]]:
    """Yield (value, bytes that it adds to the memory in use): bytes shared with an earlier value count once."""
    end = 0
    for one in sorted(live, key=lambda one: (one.offset, -one.bytes)):
        yield one, max(0, one.offset + one.bytes - max(end, one.offset))
        end = max(end, one.offset + one.bytes)
