"""Pictures of schedules."""

import sys

import pytest

from jaxshard.schedules import Costs, gpipe, interleaved, zero_bubble
from jaxshard.schedules.plot import plot_schedule, schedule_figure


def test_bars_stand_where_operations_run():
    pytest.importorskip("matplotlib")
    figure = schedule_figure(zero_bubble(2, 3, chunks=1), costs=Costs(1, 4, W=1))
    lockstep, alone = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "in lockstep: bubble 21.1%",
        "asynchronously: bubble 16.7%",
    ]
    bars = [sorted(path.get_extents().intervalx) for bar in lockstep.collections for path in bar.get_paths()]
    assert len(bars) == 18 and max(end for _, end in bars) == 19 and sum(end - start for start, end in bars) == 30
    last = max(path.get_extents().x1 for bar in alone.collections for path in bar.get_paths())
    assert last == 18
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"forward", "backward", "weights' gradients"}
    assert len(lockstep.texts) == 18 and [label.get_text() for label in lockstep.get_yticklabels()] == [
        "device 0",
        "device 1",
    ]


def test_the_suffix_says_the_kind_of_file(tmp_path):
    pytest.importorskip("matplotlib")
    plot_schedule(interleaved(2, 4), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(ValueError, match=r"pictures are written as .png, .svg, .pdf"):
        plot_schedule(gpipe(1, 1), tmp_path / "a.xyz")


def test_long_schedules_have_no_numbers_in_their_bars():
    pytest.importorskip("matplotlib")
    assert not schedule_figure(interleaved(4, 64)).axes[0].texts


def test_without_matplotlib_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib: pip install matplotlib"):
        plot_schedule(gpipe(1, 1), tmp_path / "a.png")
