"""Reading what a value shows in a notebook: its tables and texts, with the rules that every page keeps."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page.

    Attributes:
      tables: the cells of each table, row by row.
      text: all text, in pieces.
    """

    def __init__(self, source: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        # Viewers take styles and scripts away from notebooks that they do not trust.
        assert tag not in ("script", "style") and set(names) <= {"style"}, f"{tag} {attrs}: a page needs no other files"
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data)
            if "td" in self._open or "th" in self._open:
                self.tables[-1][-1][-1] += data

    @property
    def cells(self) -> set[str]:
        """Every cell of every table."""
        return {cell for table in self.tables for row in table for cell in row if cell}


def read(value: object) -> Page:
    """Parse what a value shows in a notebook."""
    return Page(value._repr_html_())  # type: ignore[attr-defined]


def numbers(text: str) -> set[str]:
    """The numbers in a text, with their decimals and exponents."""
    return set(re.findall(r"\d(?:[\d,.]*\d)?(?:e[+-]\d+)?", text))


def check_shows_text(value: object) -> Page:
    """Assert that a page has every number of the value's text; return it."""
    page = read(value)
    missing = numbers(str(value)) - numbers(" ".join(page.text))
    assert not missing, f"in the text and not on the page: {sorted(missing)}"
    return page
