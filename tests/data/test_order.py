"""The keyed permutation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard import data


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**64), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(data.permute(np.arange(size), size=size, seed=seed, epoch=epoch)) == list(range(size))


def test_permutations_look_random():
    """Of 20 epochs of 10000 windows: neighbours uncorrelated (5 sigma), fixed points about one per epoch."""
    orders = [data.permute(np.arange(10_000), size=10_000, seed=3, epoch=epoch) for epoch in range(20)]
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert sum((order == np.arange(10_000)).sum() for order in orders) < 60
    assert all((a != b).mean() > 0.99 for a, b in itertools.pairwise(orders))


def test_positions_outside_are_refused():
    with pytest.raises(ValueError, match="positions 0 to 7 are not all in 0 to 6"):
        data.permute(np.arange(8), size=7, seed=0, epoch=0)


def test_an_order_of_very_many_takes_no_memory():
    """The first million billion positions are never listed: only those that are asked for are computed."""
    size = 10**15 + 37
    order = data.permute(np.arange(1000), size=size, seed=1, epoch=2)
    assert len(set(order.tolist())) == 1000 and order.min() >= 0 and order.max() < size
    assert abs(order.mean() / size - 0.5) < 0.06  # 6 sigma
    last = data.permute(np.array([size - 1]), size=size, seed=1, epoch=2)
    assert 0 <= last[0] < size and last[0] not in order
