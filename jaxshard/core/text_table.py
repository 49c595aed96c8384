"""Format reports as text, and as HTML for notebooks: tables with aligned columns, sections, shortened lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple


class Table(NamedTuple):
    """A table of cells, to be written as text (`lines`) or HTML (`html`).

    Attributes:
      rows: the cells.
      sides: one character per column: "<" to align it left, ">" to align it right.
      head: the cells of the heading; () for none.
    """

    rows: Sequence[Sequence[str]]
    sides: str = ""
    head: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """Return the rows as text with aligned columns."""
        return align_columns([*([self.head] if self.head else []), *self.rows], self.sides)

    @property
    def html(self) -> str:
        """Return the rows as an HTML table, styled by the surrounding page."""
        head = f"<thead>{self._row(self.head, 'th')}</thead>" if self.head else ""
        return f"<table>{head}<tbody>{''.join(self._row(cells, 'td') for cells in self.rows)}</tbody></table>"

    def _row(self, cells: Sequence[str], tag: str) -> str:
        sides = ["right" if side == ">" else "left" for side in self.sides or "<" * len(cells)]
        written = [
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        ]
        return f"<tr>{''.join(written)}</tr>"


class Section(NamedTuple):
    """A part of a report: a title ("" for none), with lines and tables below it."""

    title: str
    parts: Sequence[str | Table]

    @property
    def lines(self) -> list[str]:
        """Return the lines below the title as text."""
        return [line for part in self.parts for line in (part.lines if isinstance(part, Table) else [part])]


class Folded(NamedTuple):
    """A part of an HTML page that opens by a click on its summary."""

    summary: str
    parts: Sequence[str | Table]


def page(*parts: str | Table | Section | Folded) -> str:
    """Write a report as HTML for a notebook. Text of several lines keeps its spaces; empty text is left out."""
    return f'<div style="overflow-x:auto">{"".join(map(_html, parts))}</div>'


def _html(part: str | Table | Section | Folded) -> str:
    if isinstance(part, str):
        tag = 'pre style="white-space:pre-wrap"' if "\n" in part else "p"
        return f"<{tag}>{escape(part)}</{tag.split()[0]}>" if part else ""
    if isinstance(part, Table):
        return part.html
    inside = "".join(map(_html, part.parts))
    if isinstance(part, Folded):
        return f"<details><summary>{escape(part.summary)}</summary>{inside}</details>"
    return (f"<p><b>{escape(part.title)}</b></p>" if part.title else "") + inside


def align_columns(rows: Iterable[Sequence[str]], sides: str = "") -> list[str]:
    """Pad cells so that columns line up, two spaces apart.

        >>> print("\\n".join(align_columns([("axis", "bytes"), ("data", "8"), ("tensor", "1,024")], "<>")))
        axis    bytes
        data        8
        tensor  1,024

    Args:
      rows: the cells of each line, a heading included; all rows have as many cells.
      sides: one character per column, "<" to align it left and ">" to align it right; all columns left by default.

    Returns:
      One line per row, without spaces at the end.

    Raises:
      ValueError: rows of different lengths, or another number of sides than of columns.
    """
    rows = list(rows)
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    specs = [f"{side}{width}" for side, width in zip(sides or "<" * len(columns), widths, strict=True)]
    return ["  ".join(format(cell, spec) for cell, spec in zip(row, specs, strict=True)).rstrip() for row in rows]


def first_words(words: Sequence[str], most: int = 3) -> str:
    """Join the first words by commas, and count the words that are left out: "a, b, c and 2 more"."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
