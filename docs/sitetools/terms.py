"""The index of terms: words that readers search for, and the sections that treat them.

The rows of `docs/reference/terms.md` are the only list. Each of their terms becomes an entry of Sphinx's index at the
sections that its row links. The entries are main ones (`!`), which the search of the site shows before other results.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TERMS = "docs/reference/terms.md"

_ROW = re.compile(r"^- \*\*(?P<terms>[^*]+)\*\*: (?P<links>.+(?:\n  .+)*)", re.MULTILINE)
_FENCE = re.compile(r"^(?:```+|~~~+)")


class Row(NamedTuple):
    """Words for one subject, and the sections that treat it.

    Attributes:
      terms: words that mean the same to a reader, such as "EMA" and "moving average".
      sections: (page, anchor) of each section; the anchor is "" for a page as a whole.
    """

    terms: tuple[str, ...]
    sections: tuple[tuple[str, str], ...]


def rows(text: str, page: str) -> list[Row]:
    """Read the rows of the index of terms.

    Args:
      text: the page of terms.
      page: the path of that page, from which its links count.

    Returns:
      The rows, with the pages of their sections counted from where `page` counts from.
    """
    found = []
    for row in _ROW.finditer(text):
        links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", row["links"])]
        sections = ((_joined(page, address), anchor) for address, _, anchor in links)
        found.append(Row(tuple(row["terms"].split(", ")), tuple(sections)))
    return found


def _joined(page: str, address: str) -> str:
    return os.path.normpath(Path(page).parent / address)


def section_lines(text: str, anchor: str) -> range:
    """Find a section of a page.

    Args:
      text: a page in Markdown.
      anchor: the heading as it stands in links, such as `moments-in-8-bits`; "" for the page as a whole.

    Returns:
      The numbers of its lines from the heading on, subsections included; empty where there is no such heading.
    """
    headings = _headings(text)
    for position, (line, level, heading) in enumerate(headings):
        if anchor in ("", anchor_of(heading)):
            ends = (other for other, depth, _ in headings[position + 1 :] if depth <= level)
            return range(line, next(ends, len(text.splitlines())))
    return range(0)


def _headings(text: str) -> list[tuple[int, int, str]]:
    """(line, level, words) of every heading outside of code."""
    found, fence = [], ""
    for number, line in enumerate(text.splitlines()):
        if mark := _FENCE.match(line):
            fence = "" if fence == mark[0] else fence or mark[0]
        elif not fence and (heading := re.match(r"(#+) (.*)", line)):
            found.append((number, len(heading[1]), heading[2]))
    return found


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as Git hosts and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def with_entries(text: str, page: str, index: Iterable[Row]) -> str:
    """Put the index entries of a page into its text: below its title, or above the heading of their section."""
    lines = text.split("\n")
    entries: dict[int, list[str]] = {}
    for row in index:
        for target, anchor in row.sections:
            section = section_lines(text, anchor) if target == page else ()
            if section:
                entries.setdefault(section[0] + (not anchor), []).extend(row.terms)
    for line in sorted(entries, reverse=True):
        lines[line:line] = ["", *(f"```{{index}} !single: {term}\n```" for term in entries[line]), ""]
    return "\n".join(lines)


def not_found(index: Iterable[Row], searchindex: Path) -> list[str]:
    """Say which terms the search of a built site does not lead to their pages.

    Args:
      index: the rows, with pages of the site.
      searchindex: Sphinx's `searchindex.js`.

    Returns:
      A line for each term and page.
    """
    found = json.loads(searchindex.read_text(encoding="utf-8").removeprefix("Search.setIndex(").rstrip(")"))
    names = [f"{name}.md" for name in found["docnames"]]
    return [
        f"{TERMS}: the site's search does not lead from {term!r} to {page}"
        for row in index
        for page in dict.fromkeys(page for page, _ in row.sections)
        for term in row.terms
        if page not in [names[number] for number, _, main in found["indexentries"].get(term.lower(), ()) if main]
    ]
