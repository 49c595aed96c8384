"""Pages where a viewer does not trust their notebook: what it leaves of them is all but the `<style>` element.

The rules are those of JupyterLab 4 (`packages/apputils/src/sanitizer.ts` in github.com/jupyterlab/jupyterlab): here are
the elements, attributes and properties that pages use and that it leaves. Words stay apart without any style, too.
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

TAGS = {"details", "div", "li", "p", "pre", "span", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ATTRIBUTES = {"class", "style", "title", "align"}
PROPERTIES = {
    "background", "border-left", "border-radius", "bottom", "color", "display", "font-size", "font-weight", "height",
    "left", "line-height", "margin", "margin-bottom", "margin-left", "margin-right", "max-width", "min-width",
    "overflow", "overflow-x", "padding-right", "padding-top", "position", "right", "text-align", "top", "white-space",
    "width",
}  # fmt: skip
VALUE = r"((#?[\w.%-]+|rgba?\([\d.,]+\))( |$))+"


class Removed(HTMLParser):
    """What a viewer takes away from a page, in `found`."""

    def __init__(self, source: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.found += [tag] * (tag not in TAGS | {"style"})
        for name, value in attrs:
            self.found += [f"{tag} {name}"] * (name not in ATTRIBUTES)
            style = properties(value) if name == "style" else {}
            self.found += [
                f"{key}: {said}"
                for key, said in style.items()
                if key not in PROPERTIES or not re.fullmatch(VALUE, said)
            ]


def layout():
    def init_fn(key):
        return {"embed": jnp.zeros((512, 64)), "scale": jnp.zeros((64,))}

    return js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, optax.sgd(0.1))


PAGES = {
    "table": lambda: page.page(
        page.title("Sizes"), page.legend({"param": PALETTE[0], "grad": PALETTE[1]}), page.listing(["one\n  two"]),
        page.verdict(True, "no surprises"), page.folded("all 2 arrays", page.preformatted("x")),
        page.table(Table([("data", "8")], "<>", ("axis", "size")), marks={"data": PALETTE[2]},
                   last=[page.bar({"time": (1.0, "1 s")}, {}, limit=(2.0, "usable 2 s"), width=180, height=12)]),
    ),
    "layout": lambda: layout()._repr_html_(),
    "schedule": lambda: one_f_one_b(4, 8)._repr_html_(),
    "chunks": lambda: interleaved(4, 8)._repr_html_(),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_bars_words_and_numbers_outlive_a_viewer_that_does_not_trust(name):
    source = PAGES[name]()
    assert Removed(source).found == []
    boxes = Page(source).boxes
    assert boxes and all(float(box["width"].rstrip("px%")) > 0 for box in boxes)
    assert set(OPERATIONS.values()) & {box["background"].upper() for box in boxes} or "schedule" not in name
    # Where a viewer takes inline styles away too, only blocks and cells begin on their own.
    body = re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
    blocks = re.sub(r"</?(div|p|li|ul|ol|pre|table|thead|tbody|tr|td|th|details|summary)\b[^>]*>", " ", body)
    words = " ".join(html.unescape(re.sub("<[^>]*>", "", blocks)).split())
    assert words == " ".join(" ".join(Page(source).text).split())
