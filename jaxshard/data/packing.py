"""Whole documents packed into rows, which do not see each other and do not predict each other.

A document that is longer than a row is cut into rows; where the others go is best-fit decreasing: the longest first,
each into the row with the least room that has enough. With rows of 8 tokens, and documents a and b of 5 and 10:

    tokens         b0 b1 b2 b3 b4 b5 b6 b7     a0 a1 a2 a3 a4 b8 b9  0
    targets        b1 b2 b3 b4 b5 b6 b7 b8     a1 a2 a3 a4  0 b9  0  0
    weights         1  1  1  1  1  1  1  1      1  1  1  1  0  1  0  0
    positions       0  1  2  3  4  5  6  7      0  1  2  3  4  0  1  0
    segment_ids     1  1  1  1  1  1  1  1      1  1  1  1  1  2  2  0

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from jaxshard.data.corpus import check_ids
from jaxshard.data.documents import Documents
from jaxshard.data.source import draw_indices

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Packed:
    """The source that `packed` makes.

    Attributes:
      documents: the tokens.
      batch: the number of global rows of a step.
      seq: the number of tokens of a row.
      seed: what the order is drawn from.
    """

    documents: Documents
    batch: int
    seq: int
    seed: int

    @property
    def epoch_rows(self) -> int:
        """The number of rows in an epoch, which has every token once."""
        return len(self._plan.rows) - 1

    @property
    def facts(self) -> dict[str, float]:
        """Numbers of an epoch: documents, tokens, rows, documents that are cut, and shares of the places of all rows.

        "padding" is the share of the places that hold no token, "learned" that of those whose label counts.
        """
        docs, learned = self.documents, self._plan.learned
        places, lengths = self.epoch_rows * self.seq, np.diff(docs.starts)
        return {
            "documents": len(docs),
            "tokens": len(docs.tokens),
            "rows": self.epoch_rows,
            "cut": int((lengths > self.seq).sum()),
            "tokens_per_document": len(docs.tokens) / len(docs),
            "padding": 1 - len(docs.tokens) / places,
            "learned": learned / places,
        }

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> Batch:
        """Read global rows of the batch of a step, and only these.

        Args:
          step: the number of the batch, from 0.
          rows: numbers from 0 to batch - 1.

        Returns:
          {"tokens", "targets", "positions", "segment_ids": int32[len(rows), seq], "weights": float32[len(rows), seq]}

        Raises:
          ValueError: a row outside the batch, a negative step, a token id outside the vocabulary.
        """
        return self.read(draw_indices(step, rows, batch=self.batch, size=self.epoch_rows, seed=self.seed))

    def read(self, numbers: Int[np.ndarray, " rows"]) -> Batch:
        """Read packed rows by number, from 0 to epoch_rows - 1; the rest is as in `rows`."""
        docs, plan = self.documents, self._plan
        names = ("tokens", "targets", "positions", "segment_ids")
        made: Batch = {name: np.zeros((len(numbers), self.seq), np.int32) for name in names}
        made["weights"] = np.zeros((len(numbers), self.seq), np.float32)
        for row, number in enumerate(numbers):
            place = 0
            for segment, piece in enumerate(range(plan.rows[number], plan.rows[number + 1]), 1):
                begin, length, labels = plan.begins[piece], plan.lengths[piece], plan.labels[piece]
                at = slice(place, place + length)
                made["tokens"][row, at] = docs.tokens[begin : begin + length]
                made["positions"][row, at] = np.arange(length)
                made["segment_ids"][row, at] = segment
                labelled, nexts = slice(place, place + labels), slice(begin + 1, begin + 1 + labels)
                made["targets"][row, labelled] = docs.tokens[nexts]
                made["weights"][row, labelled] = 1 if docs.answers is None else docs.answers[nexts]
                place += length
        if docs.vocab is not None:
            check_ids(made["tokens"], docs.vocab)
            check_ids(made["targets"], docs.vocab)
        return made

    @cached_property
    def _plan(self) -> _Plan:
        return _make_plan(self.documents, self.seq)


def packed(documents: Documents, *, batch: int, seq: int, seed: int) -> Packed:
    """Make a source of rows into which whole documents are packed, for `js.models` and other models of packed rows.

    Step s takes the rows s * batch to (s + 1) * batch of an endless sequence that runs through all rows in an order
    drawn from (seed, epoch), then again in another order. Which documents share a row depends on the documents and
    `seq` alone; they do not see each other, by "segment_ids". Every token of every document comes once in an epoch, and
    is predicted once but for the first of each document: a document that is cut goes on in another row, with positions
    from 0 and without the tokens before.

    Args:
      documents: what `js.data.tokenize` or `js.data.documents` returns.
      batch: the number of global rows of a step.
      seq: the number of tokens of a row.
      seed: what the order is drawn from.

    Returns:
      A source of {"tokens", "targets", "positions", "segment_ids": int32[batch, seq], "weights": float32[batch, seq]}.

    Raises:
      ValueError: `batch` or `seq` below 1, no documents, or an answer that a cut takes its prompt from: one that begins
        behind the first `seq` tokens of its document.

    Example:
        documents = js.data.documents([np.array([5, 1, 2, 0]), np.array([7, 0])], vocab=256)
        source = js.data.packed(documents, batch=2, seq=8, seed=0)
    """
    if batch < 1 or seq < 1:
        raise ValueError(f"data: batch and seq must be at least 1, got batch={batch}, seq={seq}")
    if not len(documents):
        raise ValueError("data: there are no documents to pack")
    _check_prompts(documents, seq)
    return Packed(documents, batch, seq, seed)


def eval_rows(documents: Documents, *, batch: int, seq: int, limit: int | None = None) -> Iterator[Batch]:
    """Make batches of packed rows of held-out documents, a finite number, in a fixed order; see `eval_batches`."""
    source = packed(documents, batch=batch, seq=seq, seed=0)
    total = source.epoch_rows
    count = min(total, limit or total)
    chosen = np.arange(count) * total // count
    return (source.read(part) for part in np.split(chosen, range(batch, count, batch)))


@dataclass(frozen=True)
class _Plan:
    """Where documents, or the pieces of those that are cut, go.

    Attributes:
      begins: int64[pieces], the first token of each; pieces of a row follow one another.
      lengths: int64[pieces], their tokens.
      labels: int64[pieces], how many of these have a label: all but the last of a document.
      rows: int64[rows + 1], the first piece of each row.
      learned: how many labels count.
    """

    begins: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    rows: np.ndarray
    learned: int


def _make_plan(docs: Documents, seq: int) -> _Plan:
    sizes = np.diff(docs.starts)
    pieces = -(-sizes // seq)
    document = np.repeat(np.arange(len(docs)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
    begins = docs.starts[document] + number * seq
    ends = np.minimum(begins + seq, docs.starts[document + 1])
    lengths = ends - begins
    labels = lengths - (ends == docs.starts[document + 1])
    row = _best_fit(lengths, seq)
    order = np.argsort(row, kind="stable")
    rows = np.searchsorted(row[order], np.arange(row.max() + 2))
    if docs.answers is None:
        learned = labels.sum()
    else:  # the first token of a document is no label
        learned = docs.answers.sum() - docs.answers[docs.starts[:-1]].sum()
    return _Plan(begins[order], lengths[order], labels[order], rows, int(learned))


def _best_fit(lengths: np.ndarray, seq: int) -> np.ndarray:
    """Give each length its row: the longest first, into the row with the least room that has enough."""
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    full = int((lengths == seq).sum())
    row_of[order[:full]] = np.arange(full)
    by_room: list[list[int]] = [[] for _ in range(seq + 1)]
    rooms = 0  # bit n is set where a row has room for just n more
    rows = full
    for piece, length in zip(order[full:].tolist(), lengths[order[full:]].tolist(), strict=True):
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row, rows = seq, rows, rows + 1
        row_of[piece] = row
        if left := room - length:
            by_room[left].append(row)
            rooms |= 1 << left
    return row_of


def _check_prompts(docs: Documents, seq: int) -> None:
    """Raise ValueError for documents whose first answer begins behind the first row, which cuts off its prompt."""
    if docs.answers is None:
        return
    long = np.flatnonzero(np.diff(docs.starts) > seq)
    prompts = [int(np.argmax(docs.answers[docs.starts[i] : docs.starts[i + 1]])) for i in long]
    if wrong := [(i, prompt) for i, prompt in zip(long.tolist(), prompts, strict=True) if prompt > seq]:
        named = ", ".join(f"{docs.where(i)} ({prompt} tokens)" for i, prompt in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"data: the first answer begins behind the first {seq} tokens, the length of a row, in {named}{more}; use "
            f"a seq of at least {max(prompt for _, prompt in wrong)}, or leave these out"
        )
