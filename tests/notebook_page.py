"""Reading what a value shows in a notebook: its tables and texts, with the rules that every page keeps."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page.

    Attributes:
      tables: the cells of each table, row by row, without what is drawn in them.
      text: all text outside of the style, in pieces.
      titles: the texts that stand beside the mouse, of drawn parts.
      boxes: the style of each coloured part of a drawing or legend.
    """

    def __init__(self, source: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text: list[str] = []
        self.titles: list[str] = []
        self.boxes: list[dict[str, str]] = []
        self._open: list[str] = []
        self._drawing = 0  # the number of elements that are open in the drawing, outermost of all
        self.feed(source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if ("class", "js-drawing") in attrs:
            self._drawing = len(self._open) + 1
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert tag != "script" and not {"src", "href"} & set(names), f"{tag} {attrs}: a page has no other files"
        assert not any(name.startswith("on") for name in names)
        said = dict(attrs)
        style = properties(said.get("style") or "")
        if tag == "span" and "background" in style:
            self.boxes.append(style)
            self.titles += [said["title"]] if said.get("title") else []

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"
        if len(self._open) < self._drawing:
            self._drawing = 0

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            assert "url(" not in data and "@import" not in data
        elif data.strip():
            self.text.append(data)
            if not self._drawing and ("td" in self._open or "th" in self._open):
                self.tables[-1][-1][-1] += data

    @property
    def cells(self) -> set[str]:
        """Every cell of every table."""
        return {cell for table in self.tables for row in table for cell in row if cell}


def properties(style: str) -> dict[str, str]:
    """Read the properties of an inline style."""
    return {name: value for name, _, value in (one.partition(":") for one in style.split(";")) if name}


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
