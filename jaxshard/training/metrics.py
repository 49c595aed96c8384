"""Callbacks for `fit` that write the numbers of every step to files.

run = js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("run/metrics.jsonl")])
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jaxshard.core.file_errors import naming
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
            with naming(path), path.open("a") as file:
                file.write(json.dumps({name: finite(value) for name, value in flat(record).items()}) + "\n")

    return write


def tensorboard(folder: str | Path) -> Writer:
    """Make a callback that writes every number of a record as a TensorBoard scalar of its step.

    Every record is written at once, in the cloud (such as s3://) every two seconds. Of several processes the first one
    writes.

    Args:
      folder: the folder for TensorBoard's event files.

    Returns:
      The callback.

    Raises:
      ImportError: tensorboardX is not installed.
      OSError: by the callback: the folder can't be made or written.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.tensorboard("runs/first")])
    """
    try:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event
    except ImportError as error:
        raise ImportError("TensorBoard files need tensorboardX: pip install tensorboardX") from error
    file: _Events | None = None

    def write(record: Record) -> None:
        nonlocal file
        if jax.process_index() == 0:
            with naming(folder):
                file = file or _Events(str(folder))
                numbers = {name: value for name, value in flat(record).items() if name != "step"}
                file.write(
                    Event(wall_time=time.time(), step=record.step, summary=summary.scalar(name, value))
                    for name, value in numbers.items()
                )

    return write


_UPLOAD_EVERY = 2.0
"""Seconds between writes into a folder that is not a local one: each of them sends the whole file."""


class _Events:
    """An event file of TensorBoard. tensorboardX's own writer has a thread, where a full disk goes unnoticed."""

    def __init__(self, folder: str) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import directory_check, open_file

        directory_check(folder)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_file(os.path.join(folder, name))
        self._is_remote, self._sent = "://" in folder, 0.0
        self.write([Event(wall_time=time.time(), file_version="brain.Event:2")])

    def write(self, events: Iterable[Any]) -> None:
        try:
            self._file.write(b"".join(_frame(event.SerializeToString()) for event in events))
            if not self._is_remote or time.monotonic() - self._sent >= _UPLOAD_EVERY:
                self._file.flush()
                self._sent = time.monotonic()
        except OSError:
            self.close()  # or Python complains again when it closes the file
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    __del__ = close


def _frame(record: bytes) -> bytes:
    """A record of an event file: its length, and itself, each with a checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))


def finite(value: float) -> float | None:
    """Return the number, or None if it is infinite or not a number."""
    return value if math.isfinite(value) else None
