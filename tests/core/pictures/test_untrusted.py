"""What is left of a page where a viewer does not trust its notebook: its bars, and its words and numbers apart.

The rules are those of JupyterLab 4 (`packages/apputils/src/sanitizer.ts` in github.com/jupyterlab/jupyterlab), without
what no page needs, such as forms: what is not listed here counts as taken away. Elements that are not allowed leave
their words behind, except `<style>` and `<script>`. Where a viewer takes the inline styles away too, words stay apart.
"""

import html
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.core.pictures import page
from jaxshard.core.pictures.style import OPERATIONS, PALETTE
from jaxshard.core.text_table import Table
from jaxshard.schedules import interleaved, one_f_one_b
from tests.notebook_page import Page, properties

TAGS = {
    "a", "abbr", "b", "blockquote", "br", "caption", "center", "cite", "code", "col", "colgroup", "dd", "del",
    "details", "div", "dl", "dt", "em", "figcaption", "figure", "font", "footer", "h1", "h2", "h3", "h4", "h5",
    "h6", "hr", "i", "img", "ins", "kbd", "li", "mark", "meter", "ol", "p", "pre", "progress", "q", "s", "samp",
    "section", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead",
    "tr", "tt", "u", "ul", "var", "wbr",
}  # fmt: skip
EVERYWHERE = {"class", "dir", "draggable", "hidden", "id", "lang", "spellcheck", "style", "title", "translate"}
CELL = {
    "abbr", "align", "axis", "bgcolor", "char", "charoff", "colspan", "headers", "height", "nowrap", "rowspan", "scope",
    "valign", "width",
}  # fmt: skip
ATTRIBUTES = {
    "td": CELL, "th": CELL, "div": {"align"}, "p": {"align"}, "details": {"open"}, "li": {"type", "value"},
    "tr": {"align", "bgcolor", "char", "charoff", "valign"}, "thead": {"align", "char", "charoff", "valign"},
    "tbody": {"align", "char", "charoff", "valign"}, "pre": {"width"}, "ol": {"compact", "reversed", "start", "type"},
    "table": {"align", "bgcolor", "border", "cellpadding", "cellspacing", "frame", "rules", "summary", "width"},
}  # fmt: skip
_LENGTH = r"([+-]?([0-9]*[.])?[0-9]+(px|em|rem|pt)|0)"
_PART = rf"({_LENGTH}|[+-]?([0-9]*[.])?[0-9]+%)"
_COLOUR = (
    r"(#[0-9a-f]+|rgb\(\s*\d{1,3}\s*,\s*\d{1,3}\s*,\s*\d{1,3}\s*\)"
    r"|rgba\(\s*\d{1,3}\s*,\s*\d{1,3}\s*,\s*\d{1,3}\s*,\s*(1([.]0+)?|0([.][0-9]+)?)\s*\)|black|white|transparent)"
)
_BORDER = rf"(({_LENGTH}|none|dotted|dashed|solid|{_COLOUR})\s*){{1,3}}"
PROPERTIES = {
    "background": _COLOUR, "background-color": _COLOUR, "border": _BORDER, "border-bottom": _BORDER,
    "border-left": _BORDER, "border-radius": rf"({_PART}\s*){{1,4}}", "bottom": rf"{_PART}|auto", "color": _COLOUR,
    "display": "inline|block|inline-block|flex|inline-flex|grid|none", "font-size": _PART,
    "font-weight": "normal|bold|[1-9]00", "height": rf"{_PART}|auto", "left": rf"{_PART}|auto",
    "line-height": r"normal|[0-9.]+|[0-9.]+(px|em|%)", "margin": rf"(({_PART}|auto)\s*){{1,4}}",
    "margin-bottom": rf"{_PART}|auto", "margin-left": rf"{_PART}|auto", "margin-right": rf"{_PART}|auto",
    "max-width": rf"{_PART}|none", "min-width": rf"{_PART}|auto", "opacity": r"1|0([.][0-9]+)?",
    "overflow": "visible|hidden|scroll|auto", "overflow-x": "visible|hidden|scroll|auto",
    "padding": rf"({_PART}\s*){{1,4}}", "padding-left": _PART, "padding-right": _PART, "padding-top": _PART,
    "position": "static|relative|absolute", "right": rf"{_PART}|auto", "text-align": "left|right|center|justify",
    "top": rf"{_PART}|auto", "vertical-align": "baseline|top|middle|bottom",
    "white-space": "normal|pre|nowrap|pre-wrap|pre-line", "width": rf"{_PART}|auto",
}  # fmt: skip


class Sanitized(HTMLParser):
    """A page without what is not allowed.

    Attributes:
      kept: the page that is left.
      removed: the properties of inline styles that were taken away.
    """

    def __init__(self, source: str, styles: bool = True):
        super().__init__()
        self.kept, self.removed = "", []
        self._styles, self._open = styles, []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        if tag not in TAGS:
            return
        self.kept += f"<{tag}"
        for name, value in attrs:
            if name == "style":
                value = self._style(value)
            if value and name in EVERYWHERE | ATTRIBUTES.get(tag, set()):
                self.kept += f' {name}="{html.escape(value)}"'
        self.kept += ">"

    def _style(self, style):
        found = properties(style)
        allowed = {
            name: value
            for name, value in found.items()
            if name in PROPERTIES and re.fullmatch(PROPERTIES[name], value, re.I)
        }
        self.removed += sorted(set(found) - set(allowed))
        return ";".join(f"{name}:{value}" for name, value in allowed.items()) if self._styles else ""

    def handle_endtag(self, tag):
        self._open.pop()
        self.kept += f"</{tag}>" if tag in TAGS else ""

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self.kept += html.escape(data)


def words_apart(source: str) -> str:
    """The text of a page as it is read where no style is left: only blocks and cells begin on their own."""
    blocks = re.sub(r"</?(div|p|li|ul|ol|pre|table|thead|tbody|tr|td|th|details|summary)\b[^>]*>", " ", source)
    return " ".join(html.unescape(re.sub("<[^>]*>", "", blocks)).split())


def layout():
    def init_fn(key):
        return {"embed": jnp.zeros((512, 64)), "scale": jnp.zeros((64,))}

    return js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.sgd(0.1))


PAGES = {
    "bar": lambda: page.page(
        page.bar({"param": (3.0, "3.00 MB"), "grad": (1.0, "1.00 MB")}, {"param": PALETTE[0]},
                 limit=(5.0, "usable 5 MB"))
    ),
    "table": lambda: page.page(
        page.title("Sizes"), page.legend({"param": PALETTE[0], "grad": PALETTE[1]}), page.listing(["one\n  two"]),
        page.verdict(True, "no surprises"), page.folded("all 2 arrays", page.preformatted("x")),
        page.table(Table([("data", "8")], "<>", ("axis", "size")), marks={"data": PALETTE[2]},
                   last=[page.bar({"time": (1.0, "1 s")}, {}, width=180, height=12)]),
    ),
    "layout": lambda: layout()._repr_html_(),
    "schedule": lambda: one_f_one_b(4, 8)._repr_html_(),
    "chunks": lambda: interleaved(4, 8)._repr_html_(),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_bars_words_and_numbers_outlive_a_viewer_that_does_not_trust(name):
    source = PAGES[name]()
    sanitized = Sanitized(source)
    before, after = Page(source), Page(sanitized.kept)
    assert not sanitized.removed
    assert (after.text, after.tables, after.titles) == (before.text, before.tables, before.titles)
    assert after.boxes == before.boxes and all(float(box["width"].rstrip("px%")) > 0 for box in after.boxes)
    assert set(OPERATIONS.values()) & {box["background"].upper() for box in after.boxes} or "schedule" not in name


@pytest.mark.parametrize("name", PAGES)
def test_words_stay_apart_without_any_style(name):
    kept = Sanitized(PAGES[name](), styles=False).kept
    assert "style=" not in kept
    assert words_apart(kept) == " ".join(" ".join(Page(kept).text).split())


def test_a_bar_is_a_row_of_parts_with_its_limit():
    left = Page(Sanitized(PAGES["bar"]()).kept)
    assert left.text == ["3.00 MB", "1.00 MB", "usable 5 MB"] and left.titles == ["param: 3.00 MB", "grad: 1.00 MB"]
    assert [(box["width"], box["background"]) for box in left.boxes] == [("60.00%", PALETTE[0]), ("20.00%", "#666666")]


def test_cells_keep_their_sides():
    kept = Sanitized(PAGES["table"]()).kept
    assert '<td align="right">8</td>' in kept and '<th style="text-align:left">axis</th>' in kept
