"""Docstrings in Google's style, taken apart and written as Markdown."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from typing import NamedTuple

TITLES = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Invariants": "Invariants",
    "Source": "Source",
    "Example": "Example",
    "References": "References",
}
"""The sections of a docstring and their headings on a page, in the order in which pages have them."""

_SECTION = re.compile(rf"^({'|'.join(TITLES)}):[ ]*$", re.MULTILINE)
_ENTRY = re.compile(r"^(?P<name>[*\w][^:\n]*): (?P<text>.*)$", re.DOTALL)


class Section(NamedTuple):
    """A section of a docstring: its name, "" for the text before the first one, and its text without indentation."""

    name: str
    text: str


def sections_of(docstring: str) -> list[Section]:
    """Take a docstring apart, in the order of `TITLES`."""
    prose, *rest = _SECTION.split(docstring)
    found: list[Section] = []
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        body, after = _indented(text)
        found.append(Section(name, body))
        prose += f"\n{after}" if after else ""
    found.sort(key=lambda section: list(TITLES).index(section.name))
    return [Section("", prose.strip()), *found]


def _indented(text: str) -> tuple[str, str]:
    """Return the indented text of a section, and the text after it, which belongs to no section."""
    lines = text.strip("\n").splitlines()
    end = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])).strip("\n"), "\n".join(lines[end:])


def example_of(docstring: str) -> str:
    """The code of a docstring's example, or ""."""
    return next((section.text for section in sections_of(docstring) if section.name == "Example"), "")


class Piece(NamedTuple):
    """A part of an example: code, or the words before it."""

    text: str
    is_code: bool


def pieces_of(example: str) -> list[Piece]:
    """Take an example apart: words stand before a session of Python, or less indented than code."""
    if ">>>" in example:
        words, prompt, session = example.partition(">>>")
        return [Piece(text, is_code) for text, is_code in ((words.strip(), False), (prompt + session, True)) if text]
    if _is_python(example):
        return [Piece(example, True)]
    groups = itertools.groupby(example.splitlines(), key=_Indentation())
    return [Piece(textwrap.dedent("\n".join(lines)).strip("\n"), is_code) for is_code, lines in groups]


class _Indentation:
    """Says of one line after another whether it is indented; an empty line is as the one before it."""

    def __init__(self) -> None:
        self.last = False

    def __call__(self, line: str) -> bool:
        self.last = line.startswith(" ") if line else self.last
        return self.last


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def fenced(example: str) -> str:
    """An example in Markdown: its code in blocks, as a session of Python where it is written as one."""
    return "\n\n".join(
        f"```{'pycon' if '>>>' in text else 'python'}\n{text}\n```" if is_code else text
        for text, is_code in pieces_of(example)
    )


def markdown(section: Section) -> str:
    """The text of a section as Markdown."""
    if section.name == "Example":
        return fenced(section.text)
    if section.name in ("Args", "Attributes", "Raises"):
        return "\n".join(_bullet(entry) for entry in _entries(section.text))
    return section.text


def _entries(text: str) -> list[str]:
    """The entries of a list of arguments: each begins in the first column."""
    return [entry.strip("\n") for entry in re.split(r"\n(?=\S)", text) if entry.strip()]


def _bullet(entry: str) -> str:
    found = _ENTRY.match(entry)
    if not found:
        return f"- {entry}"
    text = found["text"]
    if "\n" in text:
        first, _, rest = text.partition("\n")
        text = f"{first}\n{textwrap.indent(textwrap.dedent(rest), '  ')}"
    names = ", ".join(f"**`{name.strip()}`**" for name in found["name"].split(","))
    return f"- {names}: {text}"
