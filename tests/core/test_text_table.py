"""Reports as text and as HTML: exact lines, the same cells, and rows that do not fit together."""

import pytest

from jaxshard.core.text_table import Folded, Section, Table, align_columns, page
from tests.notebook_page import Page


def test_no_rows_are_no_lines():
    assert align_columns([]) == []


@pytest.mark.parametrize(("rows", "sides"), [([("a", "b"), ("c",)], ""), ([("a", "b")], "<"), ([("a",)], "<<")])
def test_rows_and_sides_must_be_as_many(rows, sides):
    with pytest.raises(ValueError, match="zip"):
        align_columns(rows, sides)


def test_text_and_page_have_the_same_cells():
    table = Table([("data", "8"), ("tensor", "1,024")], "<>", ("axis", "bytes"))
    assert Section("sizes", ["of axes", table]).lines == ["of axes", "axis    bytes", "data        8", "tensor  1,024"]
    source = page(Section("sizes", ["of axes", table]), "", "two\n  lines")
    found = Page(source)
    assert found.text[:2] == ["sizes", "of axes"] and found.text[-1] == "two\n  lines"
    assert [" ".join(row).split() for row in found.tables[0]] == [line.split() for line in table.lines]
    assert '<th style="text-align:left">axis</th><th style="text-align:right">bytes</th>' in source


def test_every_part_of_a_page_escapes_what_it_is_given():
    evil = "<script>alert('&\"')</script>"
    table = Table([(evil,)], head=(evil,))
    found = Page(page(evil, evil + "\n", table, Section(evil, [evil, table]), Folded(evil, [evil, table])))
    assert "".join(found.text).count("alert(") == 12
