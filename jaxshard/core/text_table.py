"""Text tables, rows of cells as lines with aligned columns, and lists of words that are cut short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of cells, which `lines` writes as text and `core/pictures/page.py` as HTML.

    Attributes:
      rows: the cells.
      sides: one character per column, as `align_columns` takes them.
      head: the cells above; () for none.
    """

    rows: Sequence[Sequence[str]]
    sides: str = ""
    head: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """The rows as text, with aligned columns."""
        return align_columns([*([self.head] if self.head else []), *self.rows], self.sides)


class Section(NamedTuple):
    """A part of a report: a title, "" for none, and lines and tables below it."""

    title: str
    parts: Sequence[str | Table]

    @property
    def lines(self) -> list[str]:
        """The lines below the title as text."""
        return [line for part in self.parts for line in (part.lines if isinstance(part, Table) else [part])]


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
    """Join words by commas, with the number of those that are left out: "a, b, c and 2 more"."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
