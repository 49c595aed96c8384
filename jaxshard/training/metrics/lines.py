"""`json_lines`: a writer of a text file with one JSON object per step."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from jaxshard.core.file_errors import naming
from jaxshard.core.local_path import local_path
from jaxshard.training.metrics.writer import Writer, finite, flat
from jaxshard.training.records import Record


def json_lines(path: str | Path) -> Writer:
    """Make a callback that appends one JSON object per step to a file.

    Every line is written at once, so that a crash loses none. Of several processes only the first writes. Numbers have
    the names that `js.metrics.flat` gives them; a number that is not finite is written as null, since JSON can't
    represent it.

    Args:
      path: the file; it is created if it does not exist.

    Returns:
      The callback.

    Raises:
      OSError: the file can't be written.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("metrics.jsonl")])
    """
    path = local_path(path)
    path.open("a").close()

    def write(record: Record) -> None:
        if jax.process_index() == 0:
            with naming(path), path.open("a") as file:
                file.write(json.dumps({name: finite(value) for name, value in flat(record).items()}) + "\n")

    return write
