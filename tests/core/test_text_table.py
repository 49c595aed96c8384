"""Aligned columns: exact lines, and rows that do not fit together."""

import pytest

from jaxshard.core.text_table import align_columns


def test_columns_are_as_wide_as_their_longest_cell():
    assert align_columns([("role", "why"), ("param", "small"), ("opt", "")]) == ["role   why", "param  small", "opt"]


def test_columns_may_be_aligned_right():
    assert align_columns([("kind", "bytes", "why"), ("a", "8", "b")], "<><") == ["kind  bytes  why", "a         8  b"]


def test_no_rows_are_no_lines():
    assert align_columns([]) == []


@pytest.mark.parametrize(("rows", "sides"), [([("a", "b"), ("c",)], ""), ([("a", "b")], "<"), ([("a",)], "<<")])
def test_rows_and_sides_must_be_as_many(rows, sides):
    with pytest.raises(ValueError, match="zip"):
        align_columns(rows, sides)
