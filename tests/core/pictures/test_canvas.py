"""Figures: light and dark, files, and the way out without matplotlib."""

import sys

import pytest

from jaxshard.core.pictures.canvas import drawing, write_picture
from jaxshard.core.pictures.style import DARK, LIGHT, PALETTE, SIZE

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.style")  # alone, `import matplotlib` does not import it


def draw():
    with drawing(3, 2) as (figure, look):
        axes = figure.subplots()
        axes.plot([1, 2])
        axes.set_title("a curve")
    return figure, axes, look


def test_a_picture_has_the_look_and_leaves_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams)
    figure, axes, look = draw()
    assert look == LIGHT and dict(matplotlib.rcParams) == before
    assert matplotlib.colors.to_hex(figure.get_facecolor()) == LIGHT.paper.lower()
    assert axes.lines[0].get_color() == PALETTE[0]
    assert axes.title.get_fontsize() == SIZE and not axes.spines["top"].get_visible()


def test_dark_styles_of_matplotlib_make_dark_pictures():
    with matplotlib.style.context("dark_background"):
        figure, axes, look = draw()
    assert look == DARK and matplotlib.colors.to_hex(figure.get_facecolor()) == DARK.paper
    assert matplotlib.colors.to_hex(axes.xaxis.get_ticklabels()[0].get_color()) == DARK.ink.lower()


def test_a_notebook_shows_it():
    png, size = draw()[0]._repr_png_()
    assert png.startswith(b"\x89PNG") and size == {"width": 216, "height": 144}


def test_files_are_of_the_kind_that_their_name_says_and_always_the_same(tmp_path):
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        for name in ("first", "second"):
            write_picture(draw()[0], tmp_path / f"{name}{suffix}")
        first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("first", "second"))
        assert first.startswith(start) and first == second
    with pytest.raises(ValueError, match=r"memory.txt: pictures are written as .png, .svg, .pdf"):
        write_picture(draw()[0], tmp_path / "memory.txt")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib \(the extra viz\)"), drawing(1, 1):
        pass
