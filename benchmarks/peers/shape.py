"""The model and the batch that every peer trains; imported by programs of all libraries, so it needs NumPy alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


class Shape(NamedTuple):
    """A GPT: pre-LN blocks, learned positions, an untied head, f32; and its global batch."""

    width: int
    blocks: int
    heads: int
    seq: int
    batch: int
    vocab: int = 256

    def tokens(self) -> np.ndarray:
        """int32[batch, seq + 1]: the global batch, the same for all."""
        return np.random.default_rng(0).integers(0, self.vocab, (self.batch, self.seq + 1), dtype=np.int32)
