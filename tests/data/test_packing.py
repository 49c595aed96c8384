"""Packing of documents into rows: every token once, no label across documents, positions from 0 in each."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard import data
from jaxshard.models.llama import llama

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def numbered(sizes, **options):
    """Documents whose tokens are all different: 1, 2, 3, ..."""
    ends = np.cumsum(sizes)
    return data.documents([np.arange(end - size, end) + 1 for size, end in zip(sizes, ends, strict=True)], **options)


@settings(max_examples=40)
@given(SIZES, st.integers(1, 17))
def test_every_token_comes_once_and_predicts_the_next_of_its_document(sizes, seq):
    docs = numbered(sizes)
    source = data.packed(docs, batch=1, seq=seq, seed=0)
    rows = source.read(np.arange(source.epoch_rows))
    filled = rows["segment_ids"] > 0
    assert sorted(rows["tokens"][filled]) == list(range(1, sum(sizes) + 1))
    assert not any(rows[name][~filled].any() for name in ("tokens", "targets", "weights", "positions"))
    labelled = rows["weights"] > 0
    np.testing.assert_array_equal(rows["targets"][labelled], rows["tokens"][labelled] + 1)
    # Every token but the first of each document is a label once.
    assert sorted(rows["targets"][labelled]) == sorted(set(range(1, sum(sizes) + 1)) - set(docs.starts[:-1] + 1))
    facts = source.facts
    assert facts["padding"] == pytest.approx(1 - filled.mean()) and facts["learned"] == pytest.approx(labelled.mean())
    assert facts["cut"] == sum(size > seq for size in sizes)


@settings(max_examples=40)
@given(SIZES, st.integers(1, 17))
def test_segments_are_whole_and_positions_begin_in_each(sizes, seq):
    docs = numbered(sizes)
    source = data.packed(docs, batch=1, seq=seq, seed=0)
    rows = source.read(np.arange(source.epoch_rows))
    document = np.searchsorted(docs.starts, rows["tokens"], side="left") * (rows["segment_ids"] > 0)
    for ids, of, tokens, positions in zip(
        rows["segment_ids"], document, rows["tokens"], rows["positions"], strict=True
    ):
        for segment in set(ids) - {0}:
            here = ids == segment
            assert len(set(of[here])) == 1  # one document, and its tokens in order
            np.testing.assert_array_equal(np.diff(tokens[here]), 1)
            np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
    # A document that fits is in one row, and half of the rows are more than half full.
    for number, size in enumerate(sizes):
        if size <= seq:
            assert (rows["tokens"] == docs.starts[number] + 1).any(1).argmax() == (
                rows["tokens"] == docs.starts[number + 1]
            ).any(1).argmax()
    assert source.epoch_rows <= 2 * -(-sum(sizes) // seq)


@settings(max_examples=40)
@given(SIZES, st.randoms())
def test_answers_alone_are_learned(sizes, random):
    answers = [np.array([random.random() < 0.5 for _ in range(size)]) for size in sizes]
    source = data.packed(numbered(sizes, answers=answers), batch=1, seq=41, seed=0)
    rows = source.read(np.arange(source.epoch_rows))
    learned = np.flatnonzero(np.concatenate([np.append(False, one[1:]) for one in answers])) + 1
    assert sorted(rows["targets"][rows["weights"] > 0]) == list(learned)
    assert source.facts["learned"] == pytest.approx((rows["weights"] > 0).mean())


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    source = data.packed(numbered([5, 9, 3, 7, 8, 2] * 4), batch=4, seq=10, seed=3)
    count = source.epoch_rows
    first, second = (
        np.concatenate(
            [data.packed(source.documents, batch=count, seq=10, seed=3).rows(epoch, np.arange(count))["tokens"]]
        )
        for epoch in (0, 1)
    )
    assert (first != second).any() and sorted(map(tuple, first)) == sorted(map(tuple, second))
    # The rows of a step do not depend on how many processes read them.
    whole = source.rows(5, np.arange(4))
    parts = [source.rows(5, np.arange(2)), source.rows(5, np.arange(2, 4))]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_best_fit_leaves_little_room():
    sizes = np.random.default_rng(0).integers(1, 300, 2000)
    assert data.packed(numbered(sizes), batch=1, seq=512, seed=0).facts["padding"] < 0.005


def test_evaluation_reads_packed_rows_in_a_fixed_order():
    docs = numbered([5, 9, 3, 7, 8, 2] * 4)
    made = list(data.eval_batches(docs, batch=4, seq=10))
    assert sum((one["segment_ids"] > 0).sum() for one in made) == len(docs.tokens)
    assert [len(one["tokens"]) for one in data.eval_batches(docs, batch=4, seq=10, limit=6)] == [4, 2]


def test_what_is_refused():
    docs = numbered([5, 2], vocab=7)
    with pytest.raises(ValueError, match="token id 7 is outside the vocabulary of 7"):
        data.packed(docs, batch=1, seq=8, seed=0).read(np.arange(1))
    with pytest.raises(ValueError, match="batch and seq must be at least 1"):
        data.packed(docs, batch=1, seq=0, seed=0)
    with pytest.raises(ValueError, match="no documents to pack"):
        data.packed(data.documents([]), batch=1, seq=8, seed=0)
    with pytest.raises(ValueError, match="document 1 is empty"):
        data.documents([np.arange(2), np.arange(0)])
    with pytest.raises(ValueError, match="one truth value for each token"):
        data.documents([np.arange(2)], answers=[np.ones(3, bool)])
    with pytest.raises(ValueError, match=r"must be bool\[2\], .* got float64\[2\]"):
        data.documents([np.arange(2)], answers=[np.ones(2)])
    late = numbered([20, 5], answers=[np.arange(20) > 12, np.ones(5, bool)])
    with pytest.raises(ValueError, match=r"documents document 0 \(13 tokens\); use a seq of at least 13"):
        data.packed(late, batch=1, seq=12, seed=0)
    assert data.packed(late, batch=1, seq=13, seed=0).epoch_rows == 2


SEQ = 32


@pytest.fixture(scope="module")
def batch():
    """Rows of answers and prompts, cut documents and padding, as a training reads them."""
    rng = np.random.default_rng(1)
    sizes = [*rng.integers(2, 24, 40).tolist(), 75]
    docs = data.documents(
        [rng.integers(0, 64, size) for size in sizes], answers=[np.arange(size) > 2 for size in sizes], vocab=64
    )
    return data.packed(docs, batch=8, seq=SEQ, seed=0).rows(0, np.arange(8))


@pytest.mark.slow
def test_packed_rows_have_the_loss_of_their_documents_alone(batch):
    """The mean over the labels of two rows, to 1e-6 relative; each document alone, in a row of its own."""
    model = llama(vocab=64, width=32, depth=1, heads=4, kv_heads=2, hidden=48, seq=SEQ)
    rows = {name: array[:2] for name, array in batch.items()}
    alone = {name: np.zeros((8, SEQ), rows[name].dtype) for name in ("tokens", "targets", "weights")}
    pieces = [(row, segment) for row in range(2) for segment in range(1, rows["segment_ids"][row].max() + 1)]
    for number, (row, segment) in enumerate(pieces):
        here = rows["segment_ids"][row] == segment
        for name, array in alone.items():
            array[number, : here.sum()] = rows[name][row, here]
    assert 2 < len(pieces) <= 8

    @jax.jit
    def mean(batch):
        return model.loss(params, batch, jax.random.key(0)).value

    params = jax.jit(model.init)(jax.random.key(0))
    assert float(mean(rows)) == pytest.approx(float(mean(alone)), rel=1e-6)
