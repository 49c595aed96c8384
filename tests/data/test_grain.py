"""Grain's data sets as they are: by number, in turn, as rows; their state is the position. Needs Grain."""

import itertools
import json

import jax
import numpy as np
import pytest

from jaxshard import data
from jaxshard.data.batches import local_rows
from tests.data.rows import Rows
from tests.data.test_batches import Process

grain = pytest.importorskip("grain")


def rows():
    """Rows in an order that Grain draws anew in every epoch."""
    return grain.MapDataset.source(np.arange(50)).seed(3).shuffle().repeat().map(as_row)


def as_row(i):
    return {"x": np.full(3, i, np.float32), "y": np.int32(i)}


def ys(stream, count):
    return [np.asarray(batch["y"]).tolist() for batch in itertools.islice(stream, count)]


EXPECTED = [rows().batch(16)[step]["y"].tolist() for step in range(8)]


def test_a_map_dataset_of_batches():
    stream = data.batches(rows().batch(16), Rows("data", data=8), start=2)
    assert stream.position == 2
    batch = next(stream)
    assert batch["x"].shape == (16, 3) and batch["x"].sharding.shard_shape((16, 3)) == (2, 3)
    assert [batch["y"].tolist(), *ys(stream, 3)] == EXPECTED[2:6]
    assert stream.position == 6


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_a_map_dataset(count):
    """The global batches do not depend on the number of processes."""
    source = data.examples(rows(), batch=16, seed=None)
    for step in range(8):
        parts = [source.rows(step, local_rows(Process(index, count), (16,)))["y"] for index in range(count)]
        assert np.concatenate(parts).tolist() == EXPECTED[step]
    assert ys(data.batches(source, Rows("data", data=8)), 4) == EXPECTED[:4]


def loader():
    sampler = grain.samplers.IndexSampler(50, num_epochs=3, seed=3, shuffle=True)
    operations = [grain.transforms.Batch(16, drop_remainder=True)]
    return grain.DataLoader(data_source=Numbers(), sampler=sampler, operations=operations)


class Numbers:
    def __repr__(self):
        return "Numbers()"  # Grain compares it with the one in a state

    def __len__(self):
        return 50

    def __getitem__(self, i):
        return as_row(i)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: rows().batch(16).to_iter_dataset(), id="iter dataset", marks=pytest.mark.slow),
        pytest.param(loader, id="data loader"),
    ],
)
def test_an_iterator_goes_on_where_it_stopped(make):
    layout = Rows("data", data=8)
    whole = ys(data.local_batches(make(), layout), 8)
    stream = data.local_batches(make(), layout)
    assert ys(stream, 3) == whole[:3]
    position = json.loads(json.dumps(stream.position))
    again = data.local_batches(make(), layout, start=position)
    assert ys(again, 5) == whole[3:] and again.position["batches"] == 8
    assert ys(data.local_batches(make(), layout, start=6), 2) == whole[6:]
    jax.tree.map(lambda stream: stream.close(), (stream, again))
