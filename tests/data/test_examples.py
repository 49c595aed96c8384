"""Rows of indexed data sets."""

import numpy as np
import pytest

from jaxshard import data


def test_an_epoch_has_every_example_once():
    source = data.examples([{"x": np.full(2, i, np.int16), "y": float(i)} for i in range(30)], batch=6, seed=1)
    for first in (0, 5):
        rows = [source.rows(step, np.arange(6)) for step in range(first, first + 5)]
        assert sorted(np.concatenate([batch["y"] for batch in rows])) == list(range(30))
    assert rows[0]["x"].shape == (6, 2) and rows[0]["x"].dtype == np.int16
    np.testing.assert_array_equal(rows[0]["x"][:, 1], rows[0]["y"])
    assert source.rows(0, np.arange(0))["x"].shape == (0, 2)


def test_without_a_seed_the_order_is_the_data_sets_own():
    source = data.examples(np.arange(10), batch=4, seed=None)
    seen = np.concatenate([source.rows(step, np.arange(4)) for step in range(5)])
    np.testing.assert_array_equal(seen, np.arange(20) % 10)


def test_examples_that_do_not_go_together_are_refused():
    def read(*examples):
        data.examples(examples, batch=len(examples), seed=None).rows(0, np.arange(len(examples)))

    with pytest.raises(ValueError, match=r"number 1 differs from number 0.*\n.*x: expected float32\[2\], got float32"):
        read({"x": np.zeros(2, np.float32)}, {"x": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"number 1 differs from number 0.*\n.*y: unexpected"):
        read({"x": np.zeros(2, np.float32)}, {"x": np.zeros(2, np.float32), "y": np.zeros(1)})
    with pytest.raises(ValueError, match="number 1 is None, as in a filtered data set"):
        read(np.zeros(2), None)
    with pytest.raises(TypeError, match=r"text \(<U3\) holds no numbers"):
        read({"text": "abc"})
    with pytest.raises(ValueError, match="the list is empty"):
        data.examples([], batch=1, seed=0)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        data.examples([1], batch=0, seed=0)
