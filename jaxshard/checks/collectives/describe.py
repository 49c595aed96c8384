"""Collectives in words and as JSON: number of executions, bytes, arrays, and the line that caused them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxshard.checks.collectives.found import Collective
from jaxshard.core.layout import human_bytes
from jaxshard.core.our_code import is_outside_engines

Entry = TypeVar("Entry")


def is_users(one: Collective) -> bool:
    """Return True if the source is a line of a model: the user's own, or one of the ready-made ones."""
    return bool(one.frames) and is_outside_engines(one.source)


def place_of(one: Collective) -> str:
    """Return the line in the user's model, or the one that uses the result; else the operation's name in the program.

    A line of an engine alone would not help: it moves every weight.
    """
    if is_users(one):
        return one.source
    if one.user:
        return one.user
    name = one.op_name or one.op
    return name if one.source in (name, one.op) else f"{one.source} ({name})"


def as_dict(one: Collective) -> dict[str, Any]:
    """Return a collective for JSON."""
    return {
        "kind": one.kind,
        "axis": "+".join(one.axes),
        "count": one.count,
        "bytes": one.bytes,
        "dtype": one.dtype,
        "shapes": [list(shape) for shape in one.shapes],
        "place": place_of(one),
        "op": one.op,
        "op_name": one.op_name,
    }


def describe(*of: Collective) -> str:
    """Write collectives of one line, kind and axes on two lines, with the arrays of the first."""
    first, count = of[0], total(one.count for one in of)
    more = f" and {len(of) - 1} more" if len(of) > 1 else ""
    over = f"{first.kind} over {'+'.join(first.axes)}, {times_str(count)}, {total_size(of)}"
    return f"{over}: {arrays_str(first)}{more}\n    at {place_of(first)}"


def by_line(entries: Iterable[Entry], found: Callable[[Entry], Collective]) -> list[tuple[Entry, ...]]:
    """Put entries whose collectives are of one line, kind and axes together; the largest first, and in each group."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: -(found(entry).bytes or 0)):
        one = found(entry)
        groups.setdefault((place_of(one), one.kind, one.axes), []).append(entry)
    return sorted(map(tuple, groups.values()), key=lambda of: -sum(found(entry).bytes or 0 for entry in of))


def add_up(found: Iterable[tuple[dict[str, Any], Collective]]) -> list[dict[str, Any]]:
    """Add up the executions and bytes of collectives that have the same labels, in their order."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for labels, one in found:
        groups.setdefault(tuple(labels.items()), []).append(one)
    return [
        dict(labels)
        | {"count": total([one.count for one in of]), "bytes": total([one.bytes for one in of])}
        | {"synchronous_bytes": total([one.bytes for one in of if one.synchronous])}
        for labels, of in groups.items()
    ]


def arrays_str(one: Collective) -> str:
    """Write dtype and shape of every array."""
    return ", ".join(f"{one.dtype}{list(shape)}" for shape in one.shapes)


def times_str(count: int | None) -> str:
    """Write how often something runs: "once", "4 times", "? times"."""
    return "? times" if count is None else "once" if count == 1 else f"{count:,} times"


def total(numbers: Iterable[int | None]) -> int | None:
    """Add up numbers; None where one is not known."""
    numbers = list(numbers)
    return None if None in numbers else sum(number or 0 for number in numbers)


def total_size(found: Iterable[Any]) -> str:
    """Write the bytes of several collectives or instructions together."""
    sizes = [one.bytes for one in found]
    return ("at least " if None in sizes else "") + human_bytes(sum(size or 0 for size in sizes))


def listed(title: str, entries: Iterable[object]) -> str:
    """Write a title and one entry on each line; "" without entries."""
    lines = [f"- {entry}" for entry in entries]
    return "\n".join([f"{title}:", *lines]) if lines else ""
