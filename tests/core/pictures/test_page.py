"""Tables and bars of notebooks: what they show, and that whatever users name is escaped."""

from jaxshard.core.pictures import page
from jaxshard.core.text_table import Section, Table
from tests.notebook_page import Page

EVIL = "<script>alert('&\"')</script>"


def test_a_table_shows_its_cells_and_escapes_them():
    table = Table([("a", "1"), (EVIL, "2")], "<>", ("name", "count"))
    found = Page(page.page(page.table(table, marks={"a": "#000000"}, last=[page.bar({"x": (1.0, "1 GB")}, {}), ""])))
    assert found.tables == [[["name", "count", ""], ["a", "1", ""], [EVIL, "2", ""]]]


def test_every_kind_of_part_escapes_what_it_is_given():
    parts = (
        page.paragraph(EVIL), page.title(EVIL), page.verdict(False, EVIL), page.listing([EVIL]),
        page.preformatted(EVIL), page.folded(EVIL, page.paragraph(EVIL)), page.legend({EVIL: "#000000"}),
        page.sections([Section(EVIL, [EVIL, Table([(EVIL,)], head=(EVIL,))])]),
        page.bar({EVIL: (1.0, EVIL)}, {EVIL: "#000000"}, limit=(2.0, EVIL), width=9999),
    )  # fmt: skip
    found = Page(page.page(*parts))
    assert "".join([*found.text, *found.titles]).count("alert(") == 16


def test_a_bar_is_as_wide_as_its_parts_are_large():
    drawn = page.bar({"a": (1.0, "1 GB"), "none": (0.0, "0"), "b": (3.0, "3 GB")}, {}, width=400)
    found = Page(drawn)
    assert [box["width"] for box in found.boxes] == ["25.00%", "75.00%"] and "width:400px" in drawn
    assert found.titles == ["a: 1 GB", "b: 3 GB"] and found.text == ["1 GB", "3 GB"]


def test_a_limit_far_away_is_left_out():
    assert "dashed" in page.bar({"a": (1.0, "1")}, {}, limit=(2.0, "limit"))
    assert "dashed" not in page.bar({"a": (1.0, "1")}, {}, limit=(200.0, "limit"))


def test_text_and_page_have_the_same_cells():
    table = Table([("data", "8"), ("tensor", "1,024")], "<>", ("axis", "bytes"))
    assert Section("sizes", ["of axes", table]).lines == ["of axes", "axis    bytes", "data        8", "tensor  1,024"]
    found = Page(page.sections([Section("sizes", ["of axes", table])]))
    assert found.text[:2] == ["sizes", "of axes"] and [" ".join(row).split() for row in found.tables[0]] == [
        line.split() for line in table.lines
    ]
