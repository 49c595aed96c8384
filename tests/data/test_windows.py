"""The order of windows, to train on and to evaluate."""

import numpy as np
import pytest

from jaxshard import data

TOKENS = (np.arange(1000) * 7 % 251).astype(np.uint8)


def test_an_epoch_has_every_window_once():
    tokens = np.arange(1001, dtype=np.uint16)
    source = data.windows(tokens, batch=4, seq=10, seed=0)
    assert source.epoch_windows == 100
    for first in (0, 25):
        starts = [row[0] for step in range(first, first + 25) for row in source.rows(step, np.arange(4))["tokens"]]
        assert sorted(starts) == list(range(0, 1000, 10))
    assert (source.rows(0, np.arange(4))["tokens"] != source.rows(25, np.arange(4))["tokens"]).any()


def test_rows_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match="rows 3 to 8 of a batch of 8"):
        data.windows(TOKENS, batch=8, seq=10, seed=0).rows(0, np.arange(3, 9))


def test_eval_batches_are_all_windows_in_order():
    made = list(data.eval_batches(np.arange(71, dtype=np.uint8), batch=3, seq=10))
    assert [len(batch["tokens"]) for batch in made] == [3, 3, 1]
    rows = np.concatenate([batch["tokens"] for batch in made])
    np.testing.assert_array_equal(rows, np.arange(0, 70, 10)[:, None] + np.arange(11))
    assert [len(batch["tokens"]) for batch in data.eval_batches(np.arange(61), batch=3, seq=10)] == [3, 3]


def test_a_limited_evaluation_is_spread_over_the_text():
    made = list(data.eval_batches(np.arange(1001, dtype=np.uint16), batch=8, seq=10, limit=4))
    np.testing.assert_array_equal(made[0]["tokens"][:, 0], [0, 250, 500, 750])
    assert len(made) == 1
    assert sum(len(b["tokens"]) for b in data.eval_batches(np.arange(31), batch=8, seq=10, limit=99)) == 3
    with pytest.raises(ValueError, match="at least 1 window, got 0"):
        data.eval_batches(np.arange(31), batch=8, seq=10, limit=0)


# Bad input.


def test_too_short_data():
    for make in (
        lambda: data.windows(TOKENS[:32], batch=1, seq=32, seed=0),
        lambda: data.eval_batches(TOKENS[:32], batch=1, seq=32),
    ):
        with pytest.raises(ValueError, match=r"32 tokens are too few for one window of seq \+ 1 = 33.*at most 31"):
            make()
    assert data.windows(TOKENS[:33], batch=1, seq=32, seed=0).epoch_windows == 1


@pytest.mark.parametrize("wrong", [{"batch": 0, "seq": 2}, {"batch": 2, "seq": 0}])
def test_sizes_below_one(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        data.windows(TOKENS, seed=0, **wrong)


def test_tokens_that_are_no_tokens():
    with pytest.raises(ValueError, match="one-dimensional integer array, got float32"):
        data.windows(np.zeros(9, np.float32), batch=1, seq=2, seed=0)
