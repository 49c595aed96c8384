"""Callbacks for `fit` that write the numbers of every step to files.

run = js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("run/metrics.jsonl")])
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax

from jaxshard.training.records import Record

Writer = Callable[[Record], None]


def flat(record: Record) -> dict[str, float]:
    """Collect all numbers of a record in one flat dict.

    Args:
      record: a step.

    Returns:
      "step", "seconds", the metrics and the speed by their names, and the evaluation as "eval/loss" and so on.
    """
    evaluation = {f"eval/{name}": value for name, value in (record.evaluation or {}).items()}
    return {"step": record.step, "seconds": record.seconds, **record.metrics, **record.speed, **evaluation}


def json_lines(path: str | Path) -> Writer:
    """Make a callback that appends one JSON object per step to a file.

    Every line is written at once, so that a crash loses none. Of several processes the first one writes.

    Args:
      path: the file; it is created if need be. Numbers are named as `flat` names them, and one that is not finite
        becomes null, as JSON has none.

    Returns:
      The callback.

    Raises:
      OSError: the file can't be written.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("metrics.jsonl")])
    """
    path = Path(path)
    path.open("a").close()

    def write(record: Record) -> None:
        if jax.process_index() == 0:
            with path.open("a") as file:
                file.write(json.dumps({name: finite(value) for name, value in flat(record).items()}) + "\n")

    return write


def tensorboard(folder: str | Path) -> Writer:
    """Make a callback that writes every number of a record as a TensorBoard scalar of its step.

    They reach the disk within two seconds. Of several processes the first one writes.

    Args:
      folder: the folder for TensorBoard's event files.

    Returns:
      The callback.

    Raises:
      ImportError: tensorboardX is not installed.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.tensorboard("runs/first")])
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError('TensorBoard files need tensorboardX: pip install "jaxshard[viz]"') from error
    writer: SummaryWriter | None = None

    def write(record: Record) -> None:
        nonlocal writer
        if jax.process_index() == 0:
            writer = writer or SummaryWriter(str(folder), flush_secs=2)
            for name, value in flat(record).items():
                if name != "step":
                    writer.add_scalar(name, value, record.step)

    return write


def finite(value: float) -> float | None:
    """Return the number, or None if it is infinite or not a number."""
    return value if math.isfinite(value) else None
