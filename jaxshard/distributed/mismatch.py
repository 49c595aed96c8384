"""Compare the facts of two processes, find the first line that differs, and describe the difference.

Facts are settings, shapes and programs as {name: text}, such as {"mesh": "data=8", "batch x": "float32[8]"}. A long
text, such as a program, is first compared by its digest, and sent only if the digests differ.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_LONG = 1000
"""Texts with more characters than this, or with several lines, are compared by their digest."""
_WIDTH = 160
"""The largest number of characters of a line that are shown."""
_VALUE_NAMES = re.compile(r"%\w+")
_NOTHING = re.compile(r"(?!)")  # matches nowhere


class Mismatch(NamedTuple):
    """A fact (such as the mesh or the shape of a batch) whose value in a process differs from the first process.

    Attributes:
      item: the name of the fact.
      here: its value in the process; for a long text, the first line that differs.
      first: its value in the first process; for a long text, the same line there.
    """

    item: str
    here: str
    first: str


def shorten_facts(facts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace each long text among {name: text} by its digest.

    Returns:
      ({name: text, or a list with the digest of a long text}, {name: long text}).
    """
    texts = {item: text for item, text in facts.items() if len(text) > _LONG or "\n" in text}
    short = {
        item: [hashlib.sha256(text.encode()).hexdigest()] if item in texts else text for item, text in facts.items()
    }
    return short, texts


def find_mismatches(
    facts: Mapping[str, str], first: Mapping[str, Any], text_of: Callable[[str], str | None]
) -> list[Mismatch]:
    """Compare the facts of this process, {name: text}, with those of the first process.

    Only likely causes are returned. If the processes are at different points of the program, no other fact is compared.
    Long texts, such as the program, are compared only if all short facts are equal, since a different program often is
    the consequence of a different flag or shape.

    Args:
      facts: the facts of this process.
      first: the facts of the first process, from `shorten_facts`.
      text_of: `text_of(name)` returns a long text of the first process, or None if it was too long to be sent.

    Returns:
      A `Mismatch` for each fact that differs.
    """
    short, _ = shorten_facts(facts)
    differing = [item for item in {**first, **short} if short.get(item) != first.get(item)]
    if "call" in differing:
        differing = ["call"]
    # Digests are in lists, so that no text is mistaken for a digest.
    plain = [item for item in differing if list not in (type(short.get(item)), type(first.get(item)))]
    if plain:
        return [Mismatch(item, short.get(item, "(none)"), first.get(item, "(none)")) for item in plain]
    # Only long texts differ: now read them. In one of the processes the text may be short or missing.
    theirs = {item: text_of(item) if isinstance(first.get(item), list) else first.get(item, "") for item in differing}
    return [Mismatch(item, *first_differing_line(facts.get(item, ""), theirs[item])) for item in differing]


def first_differing_line(here: str, first: str | None) -> tuple[str, str]:
    """Return the first line in which two texts differ, as "line <number>: <part of the line>" of each text.

    Names of values in a StableHLO program (%12) are ignored at first. They are numbered in order, so one additional
    value changes all later names, and the first changed name would be far from the cause.

    Args:
      here: the text of this process.
      first: the text of the first process; None if it was too long to be sent.
    """
    if first is None:
        return "another", "one too long to be shown"
    pairs = list(itertools.zip_longest(here.splitlines(), first.splitlines(), fillvalue="(ends)"))
    for ignored in (_VALUE_NAMES, _NOTHING):
        for number, (mine, theirs) in enumerate(pairs, 1):
            if ignored.sub("%", mine) != ignored.sub("%", theirs):
                differ = (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
                start = next(differ, min(len(mine), len(theirs)))
                return f"line {number}: {_cut(mine, start)}", f"line {number}: {_cut(theirs, start)}"
    return "another", "the same lines with other ends"


def describe_mismatches(point: str, found: Iterable[tuple[str, Mismatch]]) -> str:
    """Return the error message about differences between processes.

    If several processes have the same difference, they share a line:

        js.init: the processes differ and would hang in their first collective; ...
          - process 1 (host b), process 3 (host d): batch x float32[16], process 0 (host a): float32[8]

    Args:
      point: the name of the point of the program where the processes were compared.
      found: (name of a process, its difference from the first process) for each difference.
    """
    groups: dict[Mismatch, list[str]] = {}
    for process, mismatch in found:
        groups.setdefault(mismatch, []).append(process)
    lines = [
        f"\n  - {list_names(processes)}: {item} {here}, {first}" for (item, here, first), processes in groups.items()
    ]
    return (
        f"{point}: the processes differ and would hang in their first collective; start all of them from the same "
        f"code, data and flags{''.join(lines)}"
    )


def list_names(names: Sequence[str]) -> str:
    """Join names with commas; if there are more than eight, show the first eight and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def digest(data: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:16]


def _cut(line: str, start: int) -> str:
    """Return the part of a line around position `start` that fits into a message, with "..." for omitted text."""
    start = max(0, start - (len(line) - len(line.lstrip())))
    line = line.strip()
    if len(line) <= _WIDTH:
        return line
    begin = max(0, min(start - _WIDTH // 2, len(line) - _WIDTH))
    end = begin + _WIDTH
    return ("..." if begin else "") + line[begin:end] + ("..." if end < len(line) else "")
