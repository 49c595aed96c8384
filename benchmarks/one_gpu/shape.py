"""What all rows share: the sizes of the models, how steps are timed, and what a speed is reported as."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE, WEIGHT_DECAY, EPSILON, BETAS = 3e-4, 0.1, 1e-8, (0.9, 0.95)
ROPE_BASE, NORM_EPSILON = 10_000.0, 1e-5
AT_ONCE = 5
"""Steps that are dispatched before one is waited for."""


class NotAvailable(Exception):
    """What a row measures does not exist here; the message says what is missing."""


class Shape(NamedTuple):
    """A Llama and its batch: `rows` rows of `seq` tokens.

    `remat` is the engine's. "dots" keeps the results of products and recomputes what is cheap, as torch.compile does.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    rows: int
    seq: int = 2048
    vocab: int = 32_000
    remat: str = "dots"

    @property
    def parameters(self) -> int:
        """All parameters: embedding, blocks, last norm, output."""
        C = self.width
        return 2 * self.vocab * C + self.depth * (4 * C * C + 3 * C * self.hidden + 2 * C) + C

    @property
    def flops_per_token(self) -> dict[str, float]:
        """By the two counts."""
        six = 6 * (self.parameters - self.vocab * self.width)
        return {"6N": six, "PaLM": six + 12 * self.depth * self.width * self.seq}

    def tokens(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab, (self.rows, self.seq + 1), dtype=np.int32)

    def check_parameters(self, found: int) -> None:
        assert found == self.parameters, f"{found:,} parameters, {self.parameters:,} expected"


class Effort(NamedTuple):
    """How long a row is measured: `rounds` times `steps` steps."""

    rounds: int
    steps: int


class Timed(NamedTuple):
    """Seconds of a step in every round, and the last loss."""

    seconds: list[float]
    loss: float


def time_steps(take: Callable[[int], float], effort: Effort) -> Timed:
    """Time rounds of steps after a first one that is not counted: it compiles and warms up.

    Args:
      take: takes so many steps, waits for the last and returns its loss.
      effort: how often.
    """
    take(AT_ONCE)
    seconds, loss = [], 0.0
    for _ in range(effort.rounds):
        start = time.perf_counter()
        loss = take(effort.steps)
        seconds.append((time.perf_counter() - start) / effort.steps)
    return Timed(seconds, loss)


def speed(shape: Shape, timed: Timed, device: str) -> dict[str, Any]:
    """Seconds per step with the slowest and fastest round, tokens per second, and MFU where the chip is known.

    MFU is that of the chip's dense bf16 peak for every precision, so that rows can be compared.
    """
    import jaxshard as js

    middle = statistics.median(timed.seconds)
    per_second = shape.rows * shape.seq / middle
    chip = js.plan.chip(device)
    counts = (
        {} if chip is None else {f"mfu {n}": per_second * f / chip.peak_flops for n, f in shape.flops_per_token.items()}
    )
    return {
        "seconds_per_step": middle,
        "rounds": [min(timed.seconds), max(timed.seconds)],
        "tokens_per_second": per_second,
        **{f"mfu {count}": per_second * flops / chip.peak_flops for count, flops in counts.items()},
        "loss": timed.loss,
        "shape": shape._asdict(),
    }
