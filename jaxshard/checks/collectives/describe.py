"""A collective in words and as JSON: how often, how much, of which arrays, and the line that caused it."""

from __future__ import annotations

from typing import Any

from jaxshard.checks.collectives.found import Collective
from jaxshard.core.layout import human_bytes
from jaxshard.core.our_code import is_outside_engines


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


def describe(one: Collective) -> str:
    """Write a collective on two lines: what it moves, and where it comes from."""
    size = "? bytes" if one.bytes is None else human_bytes(one.bytes)
    over = f"{one.kind} over {'+'.join(one.axes)}"
    return f"{over}, {times_str(one.count)}, {size}: {arrays_str(one)}\n    at {place_of(one)}"


def arrays_str(one: Collective) -> str:
    """Write dtype and shape of every array."""
    return ", ".join(f"{one.dtype}{list(shape)}" for shape in one.shapes)


def times_str(count: int | None) -> str:
    """Write how often something runs: "once", "4 times", "? times"."""
    return "? times" if count is None else "once" if count == 1 else f"{count:,} times"
