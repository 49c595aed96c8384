"""`json_lines`: a writer of a text file with one JSON object per step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from pathlib import Path

import jax

from jaxshard.core.local_path import local_path
from jaxshard.training.metrics.writer import Writer, finite, flat
from jaxshard.training.records import Record


def json_lines(path: str | Path) -> Writer:
    """Make a callback that appends one JSON object per step to a file.

    Every line is written at once, so that a crash loses none. Of several processes only the first writes. Numbers have
    the names that `js.metrics.flat` gives them; a number that is not finite is written as null, since JSON can't
    represent it. A line that can't be written, such as on a full disk, is left out; the first time there is a warning,
    and the training goes on.

    Args:
      path: the file; it is created if it does not exist.

    Returns:
      The callback.

    Raises:
      OSError: the file can't be opened for writing.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("metrics.jsonl")])
    """
    path = local_path(path)
    path.open("a").close()
    warned = False

    def write(record: Record) -> None:
        nonlocal warned
        if jax.process_index() != 0:
            return
        line = json.dumps({name: finite(value) for name, value in flat(record).items()}) + "\n"
        try:
            _append(path, line.encode())
        except OSError as error:
            if not warned:
                warnings.warn(f"{path} lacks the lines from step {record.step} on: {error.strerror}", stacklevel=2)
            warned = True

    return write


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file; if it fails, take back the part of the line that was written."""
    with path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # of a device, which has no length
                file.truncate(end)
            raise
