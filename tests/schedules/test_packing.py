"""Columns come back from their words as they went in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxshard.schedules.packing import pack_columns

NUMBERS = st.tuples(st.integers(-2, 0), st.integers(0, 2**20)).flatmap(
    lambda ends: st.lists(st.integers(*ends), min_size=6, max_size=6)
)


@given(st.lists(NUMBERS, min_size=1, max_size=12))
def test_columns_survive(columns):
    given_columns = {str(i): np.array(x).reshape(3, 2) for i, x in enumerate(columns)}
    words, unpack = pack_columns(given_columns)
    back = unpack(words)
    assert {name: x.tolist() for name, x in back.items()} == {name: x.tolist() for name, x in given_columns.items()}
    assert {x.dtype for x in back.values()} == {np.dtype(np.int32)}


def test_narrow_numbers_share_a_word_and_constants_take_none():
    columns = {
        "a": np.arange(8),
        "b": np.full(8, 7),
        "c": np.arange(8)[::-1] - 1,
        "d": np.array([-1, 127] * 4, np.int8),
    }
    words, unpack = pack_columns(columns)
    assert words.shape == (8, 1)
    assert unpack(words[3]) == {"a": 3, "b": 7, "c": 3, "d": 127}
