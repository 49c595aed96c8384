"""Windows of a token array: in an order drawn from (seed, epoch) to train on, in the order of the text to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxshard.data.corpus import check_ids
from jaxshard.data.order import permute
from jaxshard.data.source import places


@dataclass(frozen=True)
class Windows:
    """The indexed source that `windows` makes."""

    tokens: np.ndarray
    batch: int
    seq: int
    seed: int
    vocab: int | None = None

    @property
    def epoch_windows(self) -> int:
        """How many windows an epoch has: each token but the first is a target at most once."""
        return (len(self.tokens) - 1) // self.seq

    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """{"tokens": int32[len(rows), seq + 1]}: the given global rows of the batch of a step."""
        epoch, position = np.divmod(places(step, rows, self.batch), self.epoch_windows)
        window = permute(position, size=self.epoch_windows, seed=self.seed, epoch=epoch)
        return {"tokens": _read(self.tokens, window * self.seq, self.seq, self.vocab)}


def windows(tokens: np.ndarray, *, batch: int, seq: int, seed: int, vocab: int | None = None) -> Windows:
    """A source of {"tokens": int32[batch, seq + 1]} from a token array, which is read lazily.

    The tokens are cut into windows of seq + 1, neighbours sharing one token. Step s takes the windows s * batch to
    (s + 1) * batch of an endless sequence that runs through all windows in an order drawn from (seed, epoch), then
    again in another order: no window comes twice in an epoch, and a batch may straddle two. The order is computed for
    the windows that are read, never stored. With `vocab` the ids of every row that is read are checked.
    """
    _check_tokens(tokens, batch, seq)
    return Windows(tokens, batch, seq, seed, vocab)


def eval_batches(
    tokens: np.ndarray, *, batch: int, seq: int, limit: int | None = None, vocab: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Held-out batches {"tokens": int32[batch, seq + 1]}, a finite number; the last may be short.

    They come in the order of the text, as NumPy arrays with all global rows, the same on every host.
    `limit` is the largest number of windows: that many, evenly spaced over the text, so that a short evaluation is no
    sample of the first files alone. Without it every window comes once.
    """
    _check_tokens(tokens, batch, seq)
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit must be at least 1 window, got {limit}")
    total = (len(tokens) - 1) // seq
    count = min(total, limit or total)
    chosen = np.arange(count) * total // count
    return ({"tokens": _read(tokens, part * seq, seq, vocab)} for part in np.split(chosen, range(batch, count, batch)))


def _read(tokens: np.ndarray, starts: np.ndarray, seq: int, vocab: int | None) -> np.ndarray:
    """int32[len(starts), seq + 1]: the windows that begin at `starts`."""
    # All windows as one view without a copy: whole rows are copied out of it, no index per token is made.
    rows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), seq + 1)[starts]
    check_ids(rows, 2**31 if vocab is None else vocab)
    return rows.astype(np.int32)


def _check_tokens(tokens: np.ndarray, batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise ValueError(f"data: batch and seq must be at least 1, got batch={batch}, seq={seq}")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"data: tokens must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")
    if len(tokens) < seq + 1:
        raise ValueError(
            f"data: {len(tokens)} tokens are too few for one window of seq + 1 = {seq + 1}; give more data or a seq of "
            f"at most {max(len(tokens) - 1, 0)}"
        )
