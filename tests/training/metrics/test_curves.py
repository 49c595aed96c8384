"""Pictures of runs: losses, their distance from one of them, and speed over time."""

import numpy as np
import pytest

from jaxshard.training.metrics.curves import loss_figure, throughput_figure
from jaxshard.training.records import Record

pytest.importorskip("matplotlib")


def records(losses, *, start=1, unit="tokens", held_out=None):
    return [
        Record(
            step, {"loss": loss}, 0.5, {f"{unit}_per_second": 100.0 * step},
            {"loss": held_out} if held_out and step == start + 1 else None,
        )
        for step, loss in enumerate(losses, start)
    ]  # fmt: skip


def points(line):
    return [tuple(map(float, point)) for point in line.get_xydata()]


def test_losses_are_drawn_at_their_steps_with_evaluations_as_dots():
    figure = loss_figure({"a": records([3.0, 2.0], start=7, held_out=2.5), "b": [4.0, 3.5, 3.0]})
    (axes,) = figure.axes
    assert [points(line) for line in axes.lines] == [[(7, 3), (8, 2)], [(1, 4), (2, 3.5), (3, 3)]]
    assert axes.collections[0].get_offsets().tolist() == [[8, 2.5]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert len({line.get_color() for line in axes.lines}) == len({line.get_linestyle() for line in axes.lines}) == 2


def test_a_reference_adds_the_largest_distance_so_far():
    figure = loss_figure({"one": [4.0, 2.0, 1.0], "two": [4.0, 2.002, 1.0005]}, reference="one")
    losses, distances = figure.axes
    assert len(losses.lines) == 2 and losses.lines[0].get_linestyle() == "--"
    (line,) = distances.lines  # the first step has no distance, and so no point on a logarithmic scale
    np.testing.assert_allclose(points(line), [(2, 1e-3), (3, 1e-3)], rtol=1e-9)
    assert distances.get_ylabel().startswith("relative difference\nfrom one")
    assert [line.get_linestyle() for line in figure.legends[0].get_lines()] == ["-", "-"]


def test_throughput_stands_over_the_time_of_the_steps():
    figure = throughput_figure({"a": records([1, 1, 1])}, title="speed")
    (axes,) = figure.axes
    assert points(axes.lines[0]) == [(0.5, 100), (1, 200), (1.5, 300)] and axes.get_ylabel() == "tokens per second"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a: 200 in the median"]
    assert figure.get_suptitle() == "speed"


def test_what_can_not_be_drawn_is_refused_by_name():
    with pytest.raises(ValueError, match="give at least one run"):
        loss_figure({})
    with pytest.raises(ValueError, match="the run 'a' has no losses"):
        loss_figure({"a": []})
    with pytest.raises(ValueError, match="no run is called 'b'; there are 'a'"):
        loss_figure({"a": [1.0]}, reference="b")
    with pytest.raises(ValueError, match="throughput_figure: give at least one run"):
        throughput_figure({})
    with pytest.raises(ValueError, match="a: no records"):
        throughput_figure({"a": []})
    with pytest.raises(ValueError, match="a tokens, b rows; give `tokens` to every fit, or none"):
        throughput_figure({"a": records([1.0]), "b": records([1.0], unit="rows")})
