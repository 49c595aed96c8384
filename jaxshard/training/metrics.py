"""Writers of training records: callbacks for `fit` that put the numbers of every step into files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax

from jaxshard.training.records import Record

Writer = Callable[[Record], None]


def flat(record: Record) -> dict[str, float]:
    """All numbers of a record in one dict: step, seconds, metrics, speed, and evaluation as "eval/loss" and so on."""
    evaluation = {f"eval/{name}": value for name, value in (record.evaluation or {}).items()}
    return {"step": record.step, "seconds": record.seconds, **record.metrics, **record.speed, **evaluation}


def json_lines(path: str | Path) -> Writer:
    """A callback that appends one JSON object per step (see `flat`) to a file, at once: a crash loses nothing.

    A number that is not finite becomes null: JSON has none. Of several processes the first one writes.

    Raises:
      OSError: the file can't be written.
    """
    path = Path(path)
    path.open("a").close()

    def write(record: Record) -> None:
        if jax.process_index() == 0:
            with path.open("a") as file:
                file.write(json.dumps({name: finite(value) for name, value in flat(record).items()}) + "\n")

    return write


def tensorboard(folder: str | Path) -> Writer:
    """A callback that writes every number of a record as a TensorBoard scalar of its step.

    They reach the disk within two seconds. Of several processes the first one writes.

    Raises:
      ImportError: tensorboardX is not installed.
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
    """The number, or None where it is infinite or not a number."""
    return value if math.isfinite(value) else None
