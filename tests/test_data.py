"""Corpora, the order of the windows, and the rows that each device gets."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import data
from jaxshard._mesh import make_mesh

TOKENS = (np.arange(1000) * 7 % 251).astype(np.uint8)


class Rows:
    """As much of a layout as the data needs: rows over some mesh axes."""

    def __init__(self, *axes, **mesh):
        self.mesh, self.axes = make_mesh(**mesh), axes

    def batch_sharding(self, array):
        return NamedSharding(self.mesh, P(self.axes))


# The order of the windows.


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


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 40),
    seq=st.integers(1, 30),
    seed=st.integers(0, 9),
    step=st.integers(0, 10**6),
    split=st.data(),
)
def test_any_rows_are_rows_of_the_global_batch(batch, seq, seed, step, split):
    source = data.windows(TOKENS, batch=batch, seq=seq, seed=seed)
    whole = source.rows(step, np.arange(batch))["tokens"]
    assert whole.shape == (batch, seq + 1) and whole.dtype == np.int32
    cut = split.draw(st.integers(0, batch))
    parts = [source.rows(step, np.arange(cut)), source.rows(step, np.arange(cut, batch))]
    np.testing.assert_array_equal(np.concatenate([part["tokens"] for part in parts]), whole)
    some = split.draw(st.lists(st.integers(0, batch - 1)))
    np.testing.assert_array_equal(source.rows(step, np.array(some, int))["tokens"], whole[some])


def test_an_epoch_has_every_window_once():
    tokens = np.arange(1001, dtype=np.uint16)
    source = data.windows(tokens, batch=4, seq=10, seed=0)
    assert source.epoch_windows == 100
    for first in (0, 25):
        starts = [row[0] for step in range(first, first + 25) for row in source.rows(step, np.arange(4))["tokens"]]
        assert sorted(starts) == list(range(0, 1000, 10))
    assert (source.rows(0, np.arange(4))["tokens"] != source.rows(25, np.arange(4))["tokens"]).any()


def test_a_batch_may_be_larger_than_an_epoch():
    source = data.windows(np.arange(31, dtype=np.uint8), batch=7, seq=10, seed=0)
    starts = source.rows(0, np.arange(7))["tokens"][:, 0]
    assert sorted(starts[:3]) == sorted(starts[3:6]) == [0, 10, 20]


def test_seeds_differ():
    rows = [data.windows(TOKENS, batch=8, seq=10, seed=seed).rows(0, np.arange(8))["tokens"] for seed in (0, 1)]
    assert (rows[0] != rows[1]).any()


def test_rows_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match="rows 3 to 8 of a batch of 8"):
        data.windows(TOKENS, batch=8, seq=10, seed=0).rows(0, np.arange(3, 9))


# Global batches.


@pytest.mark.parametrize(
    "layout", [lambda: Rows("data", data=8), lambda: Rows("a", "b", a=4, b=2), lambda: Rows("data", data=4, tensor=2)]
)
def test_batches_are_the_source_whatever_the_mesh(layout):
    source = data.windows(TOKENS, batch=16, seq=10, seed=1)
    stream = data.batches(source, layout(), start=jnp.int32(5))
    for step in (5, 6):
        tokens = next(stream)["tokens"]
        assert isinstance(tokens, jax.Array) and tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, source.rows(step, np.arange(16))["tokens"])


def test_a_host_reads_each_of_its_rows_once():
    class Spy:
        batch = 16

        def __init__(self):
            self.read = []

        def rows(self, step, rows):
            self.read += list(rows)
            return {"x": np.zeros((len(rows), 3), np.float32), "y": rows.astype(np.int32)}

    spy = Spy()
    stream = data.batches(spy, Rows("data", data=2, tensor=4))
    spy.read.clear()
    batch = next(stream)
    assert sorted(spy.read) == list(range(16))
    np.testing.assert_array_equal(batch["y"], np.arange(16))
    assert batch["x"].shape == (16, 3)
    assert batch["y"].sharding.shard_shape((16,)) == (8,)


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
    with pytest.raises(ValueError, match="rows in its first dimension"):
        next(data.local_batches([{"x": np.float32(1)}], Rows("data", data=8)))


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


# Corpora.


def test_the_standard_library():
    corpus = data.stdlib()
    assert corpus.name == f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
    assert corpus.vocab == 256 and corpus.train.dtype == np.uint8
    assert len(corpus.train) > 4_000_000
    assert 0.03 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.12
    again = data.stdlib()
    assert again.digest == corpus.digest and len(again.digest) == 64
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"class Thread:" in text and b"class TestThread" not in text


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_a_folder_is_split_by_the_hash_of_paths(tmp_path):
    files = {f"part{i % 3}/file{i}.txt": f"text {i} ".encode() * 3 for i in range(60)} | {
        ".git/config": b"hidden",
        "empty": b"",
    }
    corpus = data.load(write(tmp_path / "one", files))
    moved = data.load(write(tmp_path / "two", dict(reversed(files.items()))))
    assert corpus.digest == moved.digest
    np.testing.assert_array_equal(corpus.train, moved.train)
    texts = corpus.train.tobytes().split(b"\0") + corpus.held_out.tobytes().split(b"\0")
    assert sorted(filter(None, texts)) == sorted(
        content for name, content in files.items() if content and name[0] != "."
    )
    held = set(corpus.held_out.tobytes().split(b"\0"))
    assert 1 < len(held) < 15
    # A file that comes or goes moves no other file across the split.
    files.pop(next(name for name, content in files.items() if content in held))
    fewer = data.load(write(tmp_path / "three", files))
    assert set(fewer.held_out.tobytes().split(b"\0")) < held
    assert fewer.digest != corpus.digest


@pytest.mark.parametrize("count", [2, 3])
def test_a_small_folder_has_both_parts(tmp_path, count):
    corpus = data.load(write(tmp_path, {f"{i}.txt": b"abc" for i in range(count)}))
    assert len(corpus.train) == 4 * (count - 1) and len(corpus.held_out) == 4


def test_one_file_is_split_at_its_end(tmp_path):
    path = write(tmp_path, {"a.txt": bytes(range(100))}) / "a.txt"
    for corpus in (data.load(path), data.load(str(path)), data.load(tmp_path)):
        np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), np.arange(100))
        assert len(corpus.held_out) == 8


def test_files_that_are_not_text_are_named(tmp_path):
    write(tmp_path, {"a.txt": b"abc", "b.txt": b"def", "c.bin": b"\xff\xfe\x00"})
    with pytest.warns(UserWarning, match="left out 1 files that are not UTF-8, such as c.bin"):
        corpus = data.load(tmp_path)
    assert len(corpus.train) + len(corpus.held_out) == 8


def test_token_arrays_are_memory_mapped(tmp_path):
    tokens = np.arange(200, dtype=np.uint16) % 50
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "b.npy").write_bytes(b"")
    npy, raw = data.load(tmp_path / "a.npy", vocab=50), data.load(tmp_path / "a.bin", vocab=50, dtype="uint16")
    assert npy.digest == raw.digest and npy.vocab == 50
    for corpus in (npy, raw):
        assert isinstance(corpus.train, np.memmap)
        np.testing.assert_array_equal(corpus.train, tokens[:184])
        np.testing.assert_array_equal(corpus.held_out, tokens[184:])
    np.save(tmp_path / "bytes.npy", TOKENS)
    assert data.load(tmp_path / "bytes.npy").vocab == 256


def test_a_long_array_is_digested_in_pieces(monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 8)
    monkeypatch.setattr(data, "_SCANNED", 4)
    pieces = [piece.tolist() for piece in data._chunks(np.arange(100))]
    assert pieces == [list(range(s, s + 8)) for s in (0, 32, 64)] + [[96, 97, 98, 99]]
    assert len(list(data._chunks(np.arange(30)))) == 4
    with pytest.raises(ValueError, match="token id 99"):
        data._from_tokens("x", np.arange(100), 99)


# Bad input.


def test_missing_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        data.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin"])
def test_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"{name} is empty"):
        data.load(tmp_path / name, **({"dtype": "uint8", "vocab": 256} if name == "a.bin" else {}))


def test_a_folder_without_text(tmp_path):
    write(tmp_path, {"a": b"", "b": b"\xff"})
    with pytest.raises(ValueError, match="has no text: 1 empty files, 1 not UTF-8"):
        data.load(tmp_path)


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


def test_ids_outside_the_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 50, 3], np.uint16))
    with pytest.raises(ValueError, match=r"token id 50 is outside the vocabulary of 50 \(0 to 49\)"):
        data.load(tmp_path / "a.npy", vocab=50)
    source = data.windows(np.array([1, -2, 0, 3]), batch=1, seq=3, seed=0, vocab=50)
    with pytest.raises(ValueError, match="token id -2 is outside"):
        source.rows(0, np.arange(1))


def test_what_a_token_file_needs(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(9, np.uint16))
    np.save(tmp_path / "matrix.npy", np.zeros((3, 3), np.uint16))
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "a.txt").write_bytes(b"12345")
    for match, name, options in [
        ("is unknown; pass vocab=", "a.npy", {}),
        ("holds uint16, but dtype=int32 was given", "a.npy", {"dtype": "int32"}),
        (r"one-dimensional integer array, got uint16\(3, 3\)", "matrix.npy", {"vocab": 5}),
        ("its dtype must be given", "a.bin", {"vocab": 5}),
        ("5 bytes, no multiple of the 2 bytes of uint16", "a.bin", {"vocab": 5, "dtype": "uint16"}),
        ("is unknown; pass vocab=", "a.bin", {"dtype": "int8"}),
        ("dtype=uint16, vocab=5 were given; they are for", "a.txt", {"vocab": 5, "dtype": "uint16"}),
    ]:
        with pytest.raises(ValueError, match=match):
            data.load(tmp_path / name, **options)


def test_a_python_without_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="has no library source"):
        data.stdlib()
