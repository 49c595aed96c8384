"""Mixtures: exact shares, every source in its own order, the same rows whoever reads them."""

import math
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard import data
from jaxshard.data.mixture import assign_slots


def numbered(first, count, *, batch, seed=0):
    """Windows of two tokens that name themselves: first, first + 1, ..."""
    return data.windows(np.arange(first, first + count + 1), batch=batch, seq=1, seed=seed)


@settings(deadline=None, max_examples=60)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=9), start=st.integers(0, 10**9), data=st.data())
def test_every_run_of_slots_holds_the_shares(counts, start, data):
    """Rows of a source are numbered without gaps; whole rounds are exact; any run is within ceil(log2(sources))."""
    total = sum(counts)
    which, number = assign_slots(tuple(counts), start * total + np.arange(total))
    for i, count in enumerate(counts):
        np.testing.assert_array_equal(number[which == i], start * count + np.arange(count))
    first, last = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    for i, count in enumerate(counts):
        share = (last - first) * count / total
        assert abs((which[first:last] == i).sum() - share) <= math.ceil(math.log2(len(counts)))


def test_a_mixture_has_the_weights_and_every_row_once_per_epoch():
    """1000 rows at 0.7 to 0.2 to 0.1 are 700, 200 and 100; each source's epochs come one after the other."""
    sizes, parts = {"a": 350, "b": 200, "c": 10}, {}
    for i, (name, size) in enumerate(sizes.items()):
        parts[name] = numbered(1000 * i, size, batch=20, seed=i)
    mixed = data.mixture({"a": (parts["a"], 0.7), "b": (parts["b"], 0.2), "c": (parts["c"], 0.1)}, seed=5)
    assert mixed.counts == (7, 2, 1)
    rows = [mixed.rows(step, np.arange(20))["tokens"][:, 0] for step in range(50)]
    for step, batch in enumerate(rows):
        assert Counter(batch // 1000) == {0: 14, 1: 4, 2: 2}
        assert mixed.rows_before(step) == {"a": 14 * step, "b": 4 * step, "c": 2 * step}
    seen = np.concatenate(rows)
    for i, (name, size) in enumerate(sizes.items()):
        mine = seen[seen // 1000 == i] - 1000 * i
        for epoch in mine.reshape(-1, size):
            assert sorted(epoch) == list(range(size)), name


def test_rows_beyond_two_to_the_31_are_counted():
    """The step of a run is an int32 array: times a batch of 4096 it wraps around from step 524,288 on."""
    mixed = data.mixture({name: (numbered(0, 50, batch=4096), 0.5) for name in ("a", "b")}, seed=0)
    step = jnp.int32(1_000_000)
    assert mixed.rows_before(step) == {"a": 2_048_000_000, "b": 2_048_000_000}
    at = np.arange(3)
    np.testing.assert_array_equal(mixed.rows(step, at)["tokens"], mixed.rows(1_000_000, at)["tokens"])


@settings(deadline=None, max_examples=30)
@given(step=st.integers(0, 10**6), seed=st.integers(0, 5), rows=st.lists(st.integers(0, 11)), deep=st.booleans())
def test_any_rows_are_rows_of_the_batch(step, seed, rows, deep):
    a, b, c = (numbered(1000 * i, 40 + i, batch=12, seed=i) for i in range(3))
    mixed = data.mixture({"a": (a, 1), "b": (b, 2.5), "c": (c, 0.3)}, seed=seed)
    if deep:
        mixed = data.mixture({"mixed": (mixed, 1), "a": (a, 1)}, seed=seed + 1)
    whole = mixed.rows(step, np.arange(12))["tokens"]
    some = mixed.rows(step, np.array(rows, int))["tokens"]
    np.testing.assert_array_equal(some, whole[rows])
    assert some.dtype == np.int32 and whole.shape == (12, 2)


def test_weights_as_they_are_written():
    a = numbered(0, 9, batch=2)

    def counts(*weights):
        return data.mixture({str(i): (a, w) for i, w in enumerate(weights)}, seed=0).counts

    assert counts(0.1, 0.2, 0.7) == (1, 2, 7)
    assert counts(20, 30) == (2, 3)
    assert counts(np.float64(0.25), np.int32(1)) == (1, 4)
    third, rest = counts(1 / 3, 2 / 3)
    assert third + rest < 2**31 and abs(third / (third + rest) - 1 / 3) < 1e-9
    assert counts(1e-30, 1.0)[0] == 1


def test_what_cannot_be_mixed_is_refused():
    a, b = numbered(0, 9, batch=2), numbered(0, 9, batch=4)
    longer = data.windows(np.arange(99), batch=2, seq=3, seed=0)
    for match, sources in [
        ("no sources", {}),
        ("weight of 'a' must be above 0 and finite, got 0", {"a": (a, 0)}),
        ("weight of 'a' must be above 0 and finite, got -1.5", {"a": (a, -1.5)}),
        ("weight of 'b' must be above 0 and finite, got nan", {"a": (a, 1), "b": (a, float("nan"))}),
        (r"batch of the mixture, got \{'a': 2, 'b': 4\}", {"a": (a, 1), "b": (b, 1)}),
        (
            r"rows of 'b' differ from those of 'a'.*\n.*tokens: expected int32\[1, 2\], got int32\[1, 4\]",
            {"a": (a, 1), "b": (longer, 1)},
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            data.mixture(sources, seed=0)
    for match, sources in [
        ("the weight of 'a' must be a number, got str 'much'", {"a": (a, "much")}),
        ("'a' must be a pair", {"a": a}),
        ("'a' must be a pair", {"a": (1, a)}),
    ]:
        with pytest.raises(TypeError, match=match):
            data.mixture(sources, seed=0)
