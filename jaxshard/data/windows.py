"""Windows of a token array: shuffled for training, in the order of the text for evaluation.

The tokens are split into windows of seq + 1 tokens. Consecutive windows share one token, so that every token except the
first is predicted once. With seq = 3:

    tokens      0  1  2  3  4  5  6  7  8  9
    window 0    0  1  2  3
    window 1             3  4  5  6
    window 2                      6  7  8  9
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

from jaxshard.core.foreign_arrays import convert_foreign
from jaxshard.data.corpus import check_ids, check_token_array
from jaxshard.data.documents import Documents
from jaxshard.data.packing import eval_rows
from jaxshard.data.source import draw_indices


@dataclass(frozen=True)
class Windows:
    """The source that `windows` makes.

    Attributes:
      tokens: integers [number of tokens], in memory or memory-mapped.
      batch: the number of global rows of a step.
      seq: the number of targets of a window, which has seq + 1 tokens.
      seed: the random seed of the order of windows.
      vocab: the vocabulary size against which token ids are checked in every row that is read; None for no check.
    """

    tokens: np.ndarray
    batch: int
    seq: int
    seed: int
    vocab: int | None = None

    @property
    def epoch_windows(self) -> int:
        """Return the number of windows in an epoch. Tokens at the end that do not fill a window are not used."""
        return (len(self.tokens) - 1) // self.seq

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> dict[str, Int32[np.ndarray, "rows seq_plus_1"]]:
        """Read rows of the global batch of a step, each a window; no other windows are read.

        Args:
          step: the index of the batch, from 0.
          rows: row indices from 0 to batch - 1.

        Returns:
          {"tokens": int32[len(rows), seq + 1]}

        Raises:
          ValueError: a row outside the batch, a negative step, a token id outside the vocabulary.
        """
        window = draw_indices(step, rows, batch=self.batch, size=self.epoch_windows, seed=self.seed)
        return {"tokens": _read_windows(self.tokens, window * self.seq, self.seq, self.vocab)}


def windows(
    tokens: Int[np.ndarray, " tokens"], *, batch: int, seq: int, seed: int, vocab: int | None = None
) -> Windows:
    """Make a source of windows of a token array, shuffled anew in every epoch.

    Step s takes the windows s * batch to (s + 1) * batch - 1 of an endless sequence, which repeats all windows in a new
    random order for each (seed, epoch). An epoch contains every window once, and a batch may span two epochs. The order
    is computed only for the windows that are read, and never stored; tokens are read lazily.

        source = js.data.windows(np.memmap("tokens.bin", np.uint16, "r"), batch=32, seq=1024, seed=0)

    Args:
      tokens: integers [number of tokens], in memory or memory-mapped.
      batch: the number of global rows of a step.
      seq: the number of targets of a window, which has seq + 1 tokens.
      seed: the random seed of the order of windows.
      vocab: if given, the token ids of every row that is read are checked against it.

    Returns:
      A source of {"tokens": int32[batch, seq + 1]}.

    Raises:
      ValueError: `batch` or `seq` below 1, tokens that are not a one-dimensional integer array, or too few tokens for a
        window.

    Example:
        >>> source = windows(np.arange(100), batch=2, seq=4, seed=0)
        >>> source.rows(0, np.array([0, 1]))["tokens"].shape
        (2, 5)
    """
    tokens = convert_foreign("the tokens", tokens)
    _check_tokens(tokens, batch, seq)
    return Windows(tokens, batch, seq, seed, vocab)


def eval_batches(
    tokens: Int[np.ndarray, " tokens"] | Documents,
    *,
    batch: int,
    seq: int,
    limit: int | None = None,
    vocab: int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Make a finite number of batches for evaluation: windows in the order of the text, or packed rows of documents.

    The batches are NumPy arrays with all global rows, the same on every host.

    Args:
      tokens: integers [number of tokens], in memory or memory-mapped; or `js.data.Documents`.
      batch: the number of rows in a batch; the last batch may be shorter.
      seq: the number of targets of a row.
      limit: the largest number of rows in all batches. They are evenly spaced over the text, so that a short evaluation
        does not cover only the first files. None takes every row once.
      vocab: if given, the token ids of every row are checked against it; documents have their own vocabulary.

    Returns:
      An iterator of {"tokens": int32[batch, seq + 1]}; for documents, of batches like those of `js.data.packed`.

    Raises:
      ValueError: see `windows`; or a limit below 1. While iterating: a token id outside the vocabulary.

    Example:
        held_out = list(js.data.eval_batches(tokens, batch=8, seq=16, limit=4))
        js.evaluate(eval_step, run, held_out)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit must be at least 1 window, got {limit}")
    if isinstance(tokens, Documents):
        return eval_rows(tokens, batch=batch, seq=seq, limit=limit)
    array: np.ndarray = convert_foreign("the tokens", tokens)
    _check_tokens(array, batch, seq)
    total = (len(array) - 1) // seq
    count = min(total, limit or total)
    chosen = np.arange(count) * total // count
    parts = np.split(chosen, range(batch, count, batch))
    return ({"tokens": _read_windows(array, part * seq, seq, vocab)} for part in parts)


def _read_windows(tokens: np.ndarray, starts: np.ndarray, seq: int, vocab: int | None) -> np.ndarray:
    """Return the windows that begin at the token indices `starts`: int32[len(starts), seq + 1]."""
    # A view of all windows, without a copy: indexing copies complete rows, and needs no index per token.
    rows: np.ndarray = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), seq + 1)[starts]
    check_ids(rows, 2**31 if vocab is None else vocab)
    return rows.astype(np.int32)


def _check_tokens(tokens: np.ndarray, batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise ValueError(f"data: batch and seq must be at least 1, got batch={batch}, seq={seq}")
    check_token_array(tokens, "tokens")
    if len(tokens) < seq + 1:
        raise ValueError(
            f"data: {len(tokens)} tokens are too few for one window of seq + 1 = {seq + 1}; give more data or a seq of "
            f"at most {max(len(tokens) - 1, 0)}"
        )
