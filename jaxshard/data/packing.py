"""Pack documents into rows of fixed length, without attention or predictions between different documents.

Documents that are longer than a row are split into pieces. Pieces are packed by best-fit decreasing: the longest first,
each into the row with the least free space that is enough. With rows of 8 tokens, and documents a and b of 5 and 10
tokens:

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
      documents: the documents to pack.
      batch: the number of global rows of a step.
      seq: the number of tokens of a row.
      seed: the random seed of the order of rows.
    """

    documents: Documents
    batch: int
    seq: int
    seed: int

    @property
    def epoch_rows(self) -> int:
        """Return the number of rows in an epoch, which contains every token once."""
        return len(self._plan.rows) - 1

    @property
    def facts(self) -> dict[str, float]:
        """Return statistics of an epoch, {name: number}.

        "documents", "tokens" and "rows" are counts, "tokens_per_document" is a mean, and "cut" is the number of
        documents that are longer than a row and so are split. "padding" is the fraction of positions without a token,
        "learned" the fraction of positions whose target has weight 1.
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
        """Read rows of the global batch of a step; no other rows are read.

        Args:
          step: the index of the batch, from 0.
          rows: row indices from 0 to batch - 1.

        Returns:
          {"tokens", "targets", "positions", "segment_ids": int32[len(rows), seq], "weights": float32[len(rows), seq]}

        Raises:
          ValueError: a row outside the batch, a negative step, a token id outside the vocabulary.
        """
        return self.read(draw_indices(step, rows, batch=self.batch, size=self.epoch_rows, seed=self.seed))

    def read(self, numbers: Int[np.ndarray, " rows"]) -> Batch:
        """Read packed rows by index, from 0 to epoch_rows - 1, in the format of `rows`."""
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
    """Make a source of rows into which documents are packed, for `js.models` and other models that take "segment_ids".

    Step s takes the rows s * batch to (s + 1) * batch - 1 of an endless sequence, which repeats all rows in a new
    random order for each (seed, epoch). Which documents share a row depends only on the documents and `seq`;
    "segment_ids" prevents attention between them. In an epoch every token appears once, and is predicted once, except
    for the first token of each document. A document that is longer than a row continues in another row, with positions
    from 0 and without attention to the earlier tokens.

    Args:
      documents: documents from `js.data.tokenize` or `js.data.documents`.
      batch: the number of global rows of a step.
      seq: the number of tokens of a row.
      seed: the random seed of the order of rows.

    Returns:
      A source of {"tokens", "targets", "positions", "segment_ids": int32[batch, seq], "weights": float32[batch, seq]}.

    Raises:
      ValueError: `batch` or `seq` below 1, no documents, or a document whose first answer begins after the first `seq`
        tokens, so that it would be separated from its prompt.

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
    """Make batches of packed rows of held-out documents, in a fixed order, for `eval_batches`.

    Args:
      documents: the held-out documents.
      batch: the number of rows in a batch; the last batch may be shorter.
      seq: the number of tokens of a row.
      limit: the largest number of rows, evenly spaced over all rows; None for all.

    Returns:
      A finite iterator of batches like those of `packed`.
    """
    source = packed(documents, batch=batch, seq=seq, seed=0)
    total = source.epoch_rows
    count = min(total, limit or total)
    chosen = np.arange(count) * total // count
    return (source.read(part) for part in np.split(chosen, range(batch, count, batch)))


@dataclass(frozen=True)
class _Plan:
    """The assignment of all pieces to rows. A piece is a document, or a part of a document longer than a row.

    Attributes:
      begins: int64[pieces], the index of the first token of each piece; the pieces of a row are consecutive.
      lengths: int64[pieces], the number of tokens of each piece.
      labels: int64[pieces], the number of tokens that have a next token as target: all but the last of a document.
      rows: int64[rows + 1], the index of the first piece of each row, then the number of pieces.
      learned: the number of targets with weight 1.
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
    # The index of each piece within its document.
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = docs.starts[document] + number * seq
    ends = np.minimum(begins + seq, docs.starts[document + 1])
    lengths = ends - begins
    labels = lengths - (ends == docs.starts[document + 1])
    row = _best_fit(lengths, seq)
    order = np.argsort(row, kind="stable")
    rows = np.searchsorted(row[order], np.arange(row.max() + 2))
    if docs.answers is None:
        learned = labels.sum()
    else:  # the first token of a document is never a label
        learned = docs.answers.sum() - docs.answers[docs.starts[:-1]].sum()
    return _Plan(begins[order], lengths[order], labels[order], rows, int(learned))


def _best_fit(lengths: np.ndarray, seq: int) -> np.ndarray:
    """Assign pieces of the given lengths to rows of `seq` tokens by best-fit decreasing; return the row of each piece.

    The longest piece is placed first. Each piece is placed into the row with the least free space that is enough. Rows
    are kept in lists by their free space, and a bit mask of the non-empty lists finds the best row in one step.
    """
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    full = int((lengths == seq).sum())
    row_of[order[:full]] = np.arange(full)
    by_room: list[list[int]] = [[] for _ in range(seq + 1)]
    rooms = 0  # bit n is set if any row has free space for exactly n more tokens
    rows = full
    for piece, length in zip(order[full:].tolist(), lengths[order[full:]].tolist(), strict=True):
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1  # the lowest set bit: the least space that is enough
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
    """Raise ValueError if a document's first answer begins after its first `seq` tokens, the length of a row.

    The answer would be in another row than its prompt.
    """
    if docs.answers is None:
        return
    long = np.flatnonzero(np.diff(docs.starts) > seq)
    prompts = [int(np.argmax(docs.answers[docs.starts[i] : docs.starts[i + 1]])) for i in long]
    if wrong := [(i, prompt) for i, prompt in zip(long.tolist(), prompts, strict=True) if prompt > seq]:
        named = ", ".join(f"{docs.where(i)} ({prompt} tokens)" for i, prompt in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"data: the first answer begins after the first {seq} tokens, the length of a row, in {named}{more}; use "
            f"a seq of at least {max(prompt for _, prompt in wrong)}, or leave these out"
        )
