"""`json_lines`: a writer of a text file with one JSON object per step; `read_json_lines` reads it.

In an object store the lines are written as numbered objects; see jaxshard/storage/parts.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxshard.storage.parts import append_part, next_number, read_parts
from jaxshard.storage.paths import ObjectPath, as_path
from jaxshard.training.metrics.background import Background, End
from jaxshard.training.metrics.writer import Writer, finite, flat
from jaxshard.training.records import Record

_INTERVAL = 30.0
"""Seconds for which lines come together before they are written as an object."""


def json_lines(path: str | os.PathLike[str]) -> Writer:
    """Make a callback that appends one JSON object per step to a file.

    Every line is written at once, so that a crash loses none. Of several processes only the first writes. Numbers have
    the names that `js.metrics.flat` gives them; a number that is not finite is written as null, since JSON can't
    represent it. A line that can't be written, such as on a full disk, is left out; the first time there is a warning,
    and the training goes on.

    Objects can't be appended to. So at an address s3://bucket/metrics.jsonl the lines are written by a thread as the
    objects metrics.jsonl/000001, metrics.jsonl/000002 and so on, every 30 seconds and at the end; a resumed training
    goes on with the next number. If the process is killed, the lines of the last 30 seconds are lost. While the store
    does not answer, lines are kept and written later.

    Args:
      path: the file, which is created if it does not exist; or an address s3://... or gs://...

    Returns:
      The callback. For an address, call its method `finish()` at the end of a loop of your own, as `js.fit` does.

    Raises:
      OSError: the file can't be opened for writing; at an address no object can be written and deleted.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("metrics.jsonl")])
    """
    path = as_path(path)
    if isinstance(path, ObjectPath):
        if jax.process_index() == 0:
            path.try_to_write()
        return Background(_Parts(path))
    path.open("a").close()
    warned = False

    def write(record: Record) -> None:
        nonlocal warned
        if jax.process_index() != 0:
            return
        try:
            _append(path, _encode(record))
        except OSError as error:
            if not warned:
                warnings.warn(f"{path} lacks the lines from step {record.step} on: {error.strerror}", stacklevel=2)
            warned = True

    return write


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the metrics that `json_lines` wrote: the lines of a file, or of the numbered objects at an address.

    Args:
      path: the path or address that was given to `json_lines`.

    Returns:
      A dict for each line, in the order in which they were written.

    Raises:
      FileNotFoundError: nothing was written there.

    Example:
        losses = [line["loss"] for line in js.metrics.read_json_lines("metrics.jsonl")]
    """
    return [json.loads(line) for line in read_parts(as_path(path)).splitlines()]


class _Parts:
    """A tracker for `Background` that writes records as numbered objects."""

    def __init__(self, folder: ObjectPath) -> None:
        self.name = str(folder)
        self._folder, self._number, self._last = folder, 0, 0.0
        self._lines: list[bytes] = []

    def open(self) -> None:
        self._number, self._last = next_number(self._folder), time.monotonic()

    def send(self, records: list[Record]) -> None:
        lines = self._lines + [_encode(record) for record in records]
        if time.monotonic() - self._last >= _INTERVAL:
            self._write(lines)
            lines = []
        self._lines = lines  # not before they are written, since records are sent again after a failure

    def close(self, end: End) -> None:
        self._write(self._lines)
        self._lines = []

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._number, self._last = append_part(self._folder, b"".join(lines), self._number), time.monotonic()


def _encode(record: Record) -> bytes:
    return json.dumps({name: finite(value) for name, value in flat(record).items()}).encode() + b"\n"


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
