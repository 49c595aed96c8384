"""Global batches: the rows that each device and each process gets, made ahead, and the position in them."""

import gc
import importlib
import itertools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxshard import data
from jaxshard.data.batches import local_rows
from tests.data.rows import Rows, Spy

module = importlib.import_module("jaxshard.data.batches")  # the function has the name of its file
TOKENS = (np.arange(1000) * 7 % 251).astype(np.uint8)


@pytest.mark.parametrize(
    "layout", [lambda: Rows("data", data=8), lambda: Rows("a", "b", a=4, b=2), lambda: Rows("data", data=4, tensor=2)]
)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_the_source_whatever_the_mesh(layout, prefetch):
    source = data.windows(TOKENS, batch=16, seq=10, seed=1)
    stream = data.batches(source, layout(), start=jnp.int32(5), prefetch=prefetch)
    for step in (5, 6, 7, 8, 9):
        assert stream.position == step
        tokens = next(stream)["tokens"]
        assert isinstance(tokens, jax.Array) and tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, source.rows(step, np.arange(16))["tokens"])


def test_a_host_reads_each_of_its_rows_once():
    spy = Spy()
    stream = data.batches(spy, Rows("data", data=2, tensor=4), prefetch=0)
    spy.read.clear()
    batch = next(stream)
    assert sorted(spy.read) == list(range(16))
    np.testing.assert_array_equal(batch["y"], np.arange(16))
    assert batch["x"].shape == (16, 3)
    assert batch["y"].sharding.shard_shape((16,)) == (8,)


class Process:
    """The sharding of process `index` of `count`: its devices' parts, of which `copies` hold the same rows."""

    def __init__(self, index, count, devices=8, copies=1):
        self.parts, self.copies = devices // copies, copies
        each = devices // count
        self.mine = range(index * each, (index + 1) * each)

    def addressable_devices_indices_map(self, shape):
        rows = shape[0] // self.parts
        return {d: (slice(d // self.copies * rows, (d // self.copies + 1) * rows),) for d in self.mine}


def sources():
    tokens = [data.windows(TOKENS, batch=16, seq=10, seed=seed) for seed in (0, 1, 2)]
    yield tokens[0]
    yield data.mixture({"a": (tokens[0], 5), "b": (tokens[1], 2), "c": (tokens[2], 0.5)}, seed=3)
    yield data.examples([{"x": np.full(3, i), "y": i} for i in range(50)], batch=16, seed=4)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("source", list(sources()), ids=["windows", "mixture", "examples"])
def test_rows_of_the_processes_are_the_batch(source, count):
    """Each process reads only its rows, and joined they are what one process reads, at any step."""
    for step in (0, 1, 6, 1000):
        whole = source.rows(step, np.arange(16))
        mine = [local_rows(Process(index, count), (16,)) for index in range(count)]
        assert [len(rows) for rows in mine] == [16 // count] * count
        parts = [source.rows(step, rows) for rows in mine]
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        jax.tree.map(np.testing.assert_array_equal, joined, whole)


def test_global_batches_by_number_end():
    whole = [{"x": np.arange(16, dtype=np.float32) + step, "rate": np.float32(step)} for step in range(5)]
    made = list(data.batches(whole, Rows("data", data=8), start=2))
    assert [float(batch["rate"]) for batch in made] == [2, 3, 4]
    np.testing.assert_array_equal(made[0]["x"], whole[2]["x"])
    assert made[0]["x"].sharding.shard_shape((16,)) == (2,)
    stream = data.batches(whole, Rows("data", data=8))
    next(stream)
    assert stream.position == 1


def test_global_batches_in_turn():
    stream = data.batches(data.eval_batches(TOKENS, batch=16, seq=10), Rows("data", data=8), start=2)
    expected = list(data.eval_batches(TOKENS, batch=16, seq=10))[2]
    assert stream.position == 2
    batch = next(stream)["tokens"]
    np.testing.assert_array_equal(batch, expected["tokens"])
    assert batch.sharding.spec == P(("data",)) and stream.position == 3


@pytest.mark.parametrize(
    ("source", "match"),
    [({"x": np.zeros(8)}, "a dict is no source"), ("abc", "a str is no source"), (5, "got int; give a source")],
)
def test_what_is_no_source_is_refused(source, match):
    with pytest.raises(TypeError, match=match):
        data.batches(source, Rows("data", data=8))


def test_numbers_below_zero_are_refused():
    source = data.windows(TOKENS, batch=16, seq=10, seed=1)
    with pytest.raises(ValueError, match="start must be 0 or more, got -1"):
        data.batches(source, Rows("data", data=8), start=-1)
    with pytest.raises(ValueError, match="prefetch must be 0 or more batches, got -1"):
        data.batches(source, Rows("data", data=8), prefetch=-1)
    with pytest.raises(ValueError, match="steps count from 0, got step -1"):
        source.rows(-1, np.arange(2))


# Made ahead.


def wait_for(fact):
    end = time.monotonic() + 20
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_batches_are_made_ahead_and_no_further():
    spy = Spy()
    stream = data.batches(spy, Rows("data", data=8), prefetch=2)
    spy.steps.clear()
    assert not spy.steps
    for step in range(4):
        assert float(next(stream)["x"][0, 0]) == step
        wait_for(lambda step=step: spy.steps == list(range(step + 3)))
        assert stream.position == step + 1
    time.sleep(0.05)
    assert spy.steps == list(range(6))


def failing():
    yield {"x": np.zeros(8, np.float32)}
    yield {"x": np.ones(8, np.float32)}
    raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_error_comes_in_the_place_of_its_batch(prefetch):
    stream = data.local_batches(failing(), Rows("data", data=8), prefetch=prefetch)
    assert [float(next(stream)["x"][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert list(stream) == [] and stream.position == 2


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("batches")}


@pytest.mark.slow
def test_threads_end_with_their_batches():
    before = threads()
    with data.batches(Spy(), Rows("data", data=8)) as stream:
        next(stream)
        assert len(threads() - before) == 1
    assert threads() <= before
    with pytest.raises(StopIteration):
        next(stream)

    stream = data.batches(Spy(), Rows("data", data=8))
    next(stream)
    assert len(threads() - before) == 1
    del stream
    gc.collect()
    wait_for(lambda: threads() <= before)

    assert len(list(data.local_batches([{"x": np.zeros(8, np.float32)}], Rows("data", data=8)))) == 1
    assert threads() <= before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_doubles_stay_doubles(prefetch):
    with jax.enable_x64(True):
        stream = data.local_batches([{"x": np.full(8, 0.1)}], Rows("data", data=8), prefetch=prefetch)
        assert next(stream)["x"].dtype == jnp.float64


def test_placing_runs_no_program(caplog):
    """Another thread must not start programs: on simulated devices two programs at once wait for each other."""
    with jax.log_compiles(), caplog.at_level("WARNING"):
        rows = data.local_batches([{"x": np.zeros((24, 5), np.float32)}], Rows("data", data=8), prefetch=0)
        whole = data.batches([{"x": np.zeros((40, 5), np.int64)}], Rows("data", data=4, tensor=2), prefetch=0)
        spied = data.batches(Spy(), Rows("data", data=4, tensor=2), prefetch=0)
        for stream in (rows, whole, spied):
            next(stream)
        assert not [record.message for record in caplog.records if "ompil" in record.message]
        jax.jit(lambda x: x + 41)(np.zeros((3, 7)))
        assert [record.message for record in caplog.records if "ompil" in record.message]


# This host's rows, and the position.


def test_local_batches():
    rows = [
        {"tokens": np.arange(24, dtype=np.int32).reshape(8, 3) + step, "weights": np.ones(8, np.float32)}
        for step in (0, 1)
    ]
    made = list(data.local_batches(rows, Rows("data", data=4, tensor=2)))
    assert len(made) == 2
    for given_, batch in zip(rows, made, strict=True):
        np.testing.assert_array_equal(batch["tokens"], given_["tokens"])
        assert batch["tokens"].sharding.shard_shape((8, 3)) == (2, 3)
    with pytest.raises(ValueError, match="rows in its first dimension, but x is a scalar"):
        next(data.local_batches([{"x": np.float32(1)}], Rows("data", data=8)))


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("entry", [data.local_batches, data.batches], ids=["local", "global"])
def test_an_iterator_may_use_its_buffer_again(entry, prefetch):
    def reusing():
        buffer = np.empty((1024, 4), np.float32)
        for step in range(6):
            buffer[:] = step
            yield {"x": buffer}

    for layout in (Rows("data", data=8), Rows(data=8)):
        made = list(entry(reusing(), layout, prefetch=prefetch))
        assert [np.unique(batch["x"]).tolist() for batch in made] == [[step] for step in range(6)]


class Counter:
    """An iterator that saves its position, in a state that it goes on changing."""

    def __init__(self, wrap=dict):
        self.state, self.wrap = {"next": 0}, wrap

    def __iter__(self):
        return self

    def __next__(self):
        self.state["next"] += 1
        return {"x": np.full(8, self.state["next"] - 1.0, np.float32)}


class Torchlike:
    """As torchdata's loaders and Hugging Face's data sets: the state is not the iterator's, and is set before it."""

    def __init__(self):
        self.counter = Counter()

    def __iter__(self):
        first, self.counter.state = self.counter.state, {"next": self.counter.state["next"]}
        assert first is not self.counter.state
        yield from self.counter

    def state_dict(self):
        return self.counter.state

    def load_state_dict(self, state):
        self.counter.state = state


@pytest.mark.parametrize("entry", [data.local_batches, data.batches], ids=["local", "global"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_iterator_goes_on_at_its_position(entry, prefetch):
    layout = Rows("data", data=8)
    stream = entry(Torchlike(), layout, prefetch=prefetch)
    seen = [float(batch["x"][0]) for batch in itertools.islice(stream, 4)]
    position = json.loads(json.dumps(stream.position))
    assert position == stream.position and position["batches"] == 4
    again = entry(Torchlike(), layout, start=position, prefetch=prefetch)
    assert again.position == position
    seen += [float(batch["x"][0]) for batch in itertools.islice(again, 3)]
    assert seen == list(range(7)) and again.position["batches"] == 7
    skipped = entry(Torchlike(), layout, start=5, prefetch=prefetch)
    assert float(next(skipped)["x"][0]) == 5 and skipped.position["batches"] == 6


def test_the_position_of_a_plain_iterator_is_a_count():
    layout = Rows("data", data=8)
    stream = data.local_batches(Counter(), layout)
    next(stream)
    assert stream.position == 1
    again = data.local_batches(Counter(), layout, start=stream.position)
    assert float(next(again)["x"][0]) == 1
    with pytest.raises(TypeError, match="for a Counter, which has neither get_state"):
        data.local_batches(Counter(), layout, start={"batches": 1, "state": {}})
    with pytest.raises(ValueError, match="is no position"):
        data.local_batches(Torchlike(), layout, start={"next": 1})
