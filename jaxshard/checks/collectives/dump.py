"""The text of an XLA dump, rewritten as `compiled.as_text()` would print it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxshard.checks.collectives.hlo import find_closing


def expand_elements(text: str) -> str:
    """Write the elements of tuples as operations of their own.

    A dump writes `%while.3#2` for an element of a tuple, where `as_text()` prints `get-tuple-element(%while.3)`. A text
    that has none stays as it is.
    """
    return "\n".join(_expanded(text.splitlines())) if re.search(r"%[\w.\-~]+#\d", text) else text


def _expanded(lines: list[str]) -> Iterator[str]:
    types: dict[str, str] = {}
    for line in lines:
        if line.endswith("{") and not line.startswith(" "):
            types = {}
        found = re.match(r"\s+(?:ROOT )?%([\w.\-~]+) = (.*)", line)
        if found is None:
            yield line
            continue
        is_tuple = found[2].startswith("(")
        types[found[1]] = found[2][: find_closing(found[2], 0) + 1] if is_tuple else found[2].partition(" ")[0]
        code, metadata, notes = line.partition(", metadata=")
        for name, indices in dict.fromkeys(re.findall(r"%([\w.\-~]+)((?:#\d+)+)", code)):
            whole = name
            for index in map(int, indices.split("#")[1:]):
                part = f"{whole}.element{index}"
                if part not in types:
                    types[part] = _elements(types[whole])[index]
                    yield f"  %{part} = {types[part]} get-tuple-element(%{whole}), index={index}"
                whole = part
            code = re.sub(rf"%{re.escape(name + indices)}(?!\d)", f"%{whole}", code)
        yield code + metadata + notes


def _elements(tuple_type: str) -> list[str]:
    """The types of a tuple's elements."""
    text = re.sub(r"/\*.*?\*/", "", tuple_type[1:-1])
    parts, depth, start = [], 0, 0
    for found in re.finditer(r"[()\[\]{},]", text):
        if found[0] == "," and depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
        elif found[0] != ",":
            depth += 1 if found[0] in "([{" else -1
    return [*parts, text[start:].strip()]
