"""Operations of a compiled program as users see them: how often each runs, its arrays, and the line that caused it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxshard.core.layout import human_bytes
from jaxshard.core.our_code import is_outside_engines
from jaxshard.hlo import hlo
from jaxshard.hlo.counts import grouped, number_str, total
from jaxshard.hlo.source import find_reader, find_source

Entry = TypeVar("Entry")

_SHOWN = 4
"""The number of arrays of one operation that are printed."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a compiled program, as one device sees it.

    Attributes:
      kind: the opcode, such as "fusion"; of a collective one of `found.KINDS`.
      count: executions per step: the product of the trip counts of enclosing loops; None if a trip count is not known.
      arrays: dtype and shape of each of its arrays.
      op: its name in the program.
      source: `file:line` of the innermost frame in the user's code, or in this package for operations of an engine;
        `near file:line` of a nearby operation if the compiler lost the line; else the operation's name.
      frames: `file:line` of all frames, from the innermost outwards.
      op_name: JAX's path of names, such as "jit(step)/jvp(Net)/dot_general".
      user: `file:line` of the nearest operation that uses the result, in the user's code or else in a library; or "".
    """

    kind: str
    count: int | None
    arrays: tuple[hlo.Array, ...]
    op: str
    source: str
    frames: tuple[str, ...] = ()
    op_name: str = ""
    user: str = ""

    @property
    def dtype(self) -> str:
        """The dtype as compiled (the CPU compiler promotes bf16 collectives to f32); several joined by "+"."""
        return "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays."""
        return tuple(shape for _, shape in self.arrays)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each of the arrays in one execution, without padding."""
        return tuple(map(hlo.nbytes, self.arrays))

    @property
    def bytes(self) -> int | None:
        """Bytes of all arrays, per step: their sizes times `count`; None if `count` is not known."""
        return None if self.count is None else self.count * sum(self.sizes)

    @property
    def elements(self) -> int:
        """The number of elements of the largest array."""
        return max(map(math.prod, self.shapes))

    @property
    def is_users(self) -> bool:
        """True if `source` is a line outside of jaxshard, such as the user's, or a line of its ready-made models."""
        return bool(self.frames) and is_outside_engines(self.source)

    @property
    def place(self) -> str:
        """The source line to show: the line of the user's model that issues the operation or that uses its result.

        A line of an engine is not shown, since it would be the same for every weight. If no line of a model is known,
        the name of the operation is shown.
        """
        if self.is_users:
            return self.source
        if self.user:
            return self.user
        name = self.op_name or self.op
        return name if self.source in (name, self.op) else f"{self.source} ({name})"

    @property
    def title(self) -> str:
        """The name under which lists show the operation, such as "fusion.7"."""
        return self.op

    @property
    def arrays_str(self) -> str:
        """Dtype and shape of the first arrays as text, such as "f32[4, 8], bf16[16], ..."."""
        shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.arrays[:_SHOWN])
        return shown + ", ..." * (len(self.arrays) > _SHOWN)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: kind, count, bytes, dtype, shapes, place, op and op_name."""
        words = {"kind": self.kind, "count": self.count, "bytes": self.bytes, "dtype": self.dtype}
        shapes = [list(shape) for shape in self.shapes]
        return words | {"shapes": shapes, "place": self.place, "op": self.op, "op_name": self.op_name}

    def __str__(self) -> str:
        return describe([self])


def describe(of: Sequence[Operation]) -> str:
    """Describe operations of the same title and source line in two lines of text.

    For example "all-gather over data, 4 times, 32.8 kB: f32[32, 64] and 1 more", then "at model.py:31".
    """
    first, times = of[0], times_str(total(one.count for one in of))
    more = f" and {len(of) - 1} more" if len(of) > 1 else ""
    return f"{first.title}, {times}, {total_size(of)}: {first.arrays_str}{more}\n    at {first.place}"


def times_str(count: int | None) -> str:
    """Format how often something runs: "once", "4 times", "? times"."""
    return "once" if count == 1 else f"{number_str(count)} times"


def total_size(found: Iterable[Operation]) -> str:
    """Format the total bytes of several operations: "3.84 kB", or "at least 3.84 kB" if a trip count is unknown."""
    sizes = [one.bytes for one in found]
    return ("at least " if None in sizes else "") + human_bytes(sum(size or 0 for size in sizes))


def by_line(entries: Iterable[Entry], found: Callable[[Entry], Operation]) -> list[list[Entry]]:
    """Group entries whose operations have the same source line and title.

    Groups are sorted by bytes, the largest first, and so are the entries of each group. `found` returns the operation
    of an entry.
    """

    def size(entry: Entry) -> int:
        return found(entry).bytes or 0

    largest_first = sorted(entries, key=size, reverse=True)
    groups = grouped(largest_first, lambda entry: (found(entry).place, found(entry).title))
    return sorted(groups.values(), key=lambda of: sum(map(size, of)), reverse=True)


def origin_of(scope: hlo.Scope, op: hlo.Op) -> dict[str, Any]:
    """Return op, op_name, source, frames and user of an operation as keyword arguments for `Operation`."""
    source = find_source(scope, op)
    return {
        "op": op.name,
        "op_name": source.op_name,
        "source": source.line,
        "frames": source.frames,
        "user": find_reader(scope, op).line,
    }
