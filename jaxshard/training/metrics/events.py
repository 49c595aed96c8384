"""`tensorboard`: a writer of TensorBoard's event files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxshard.core.file_errors import naming
from jaxshard.core.local_path import check_local
from jaxshard.training.metrics.configuration import describe
from jaxshard.training.metrics.writer import Writer, flat
from jaxshard.training.records import Record

SCHEMES = ("gs", "s3")
"""The schemes of remote addresses to which tensorboardX can write."""

_UPLOAD_EVERY = 2.0
"""Seconds between writes to a remote folder; each write uploads the complete file."""


def tensorboard(folder: str | Path, *, config: Mapping[str, Any] | None = None) -> Writer:
    """Make a callback that writes every number of a record as a TensorBoard scalar of its step.

    Every record is written at once; to a remote folder (such as s3://), records are written every two seconds. Of
    several processes only the first writes. A resumed training writes another file into the folder, and for steps that
    are taken again, TensorBoard shows the records of the later file.

    Args:
      folder: the folder for TensorBoard's event files, or an address gs://... or s3://... as a string.
      config: facts about the training run, as for `js.metrics.wandb`; they are shown under "Text".

    Returns:
      The callback.

    Raises:
      ImportError: tensorboardX is not installed; or for gs:// google-cloud-storage, for s3:// boto3.
      ValueError: `folder` is an address of another kind.
      OSError: by the callback: the folder can't be made or written.

    Example:
        js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.tensorboard("runs/first")])
    """
    check_local(folder, schemes=SCHEMES)
    try:
        from tensorboardX import record_writer
    except ImportError as error:
        raise ImportError('TensorBoard files need tensorboardX: pip install "tensorboardX>=2.6"') from error
    needs = {
        "gs": (record_writer.GCS_ENABLED, "google-cloud-storage"),
        "s3": (record_writer.S3_ENABLED, "boto3"),
    }
    is_there, package = needs.get(str(folder).partition("://")[0], (True, ""))
    if not is_there:
        raise ImportError(f"{folder}: to write there, tensorboardX needs {package}: pip install {package}")
    return _Events(folder, describe(config or {}))


class _Events:
    """A writer of TensorBoard's event files: one file from the first record to `finish`, a new file for later records.

    tensorboardX's own writer uses a thread, in which the error of a full disk is lost.
    """

    def __init__(self, folder: str | Path, config: dict[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._file: Any = None
        self._is_remote, self._sent = "://" in str(folder), 0.0

    def __call__(self, record: Record) -> None:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        if jax.process_index() != 0:
            return
        with naming(self._folder):
            if self._file is None:
                self._open(record.step)
            numbers = {name: value for name, value in flat(record).items() if name != "step"}
            self._write(
                Event(wall_time=time.time(), step=record.step, summary=summary.scalar(name, value))
                for name, value in numbers.items()
            )

    def finish(self, error: BaseException | None = None) -> None:
        """Write pending records, and close the file."""
        if self._file is not None:
            with naming(self._folder):
                try:
                    self._file.flush()
                finally:
                    self._close()

    def _open(self, step: int) -> None:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import directory_check, open_file

        directory_check(str(self._folder))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_file(os.path.join(str(self._folder), name))
        now = time.time()
        events = [Event(wall_time=now, file_version="brain.Event:2")]
        if step > 1:  # TensorBoard drops this step and later ones from older files of the folder
            events.append(Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START)))
        if self._config:
            text = f"```json\n{json.dumps(self._config, indent=2)}\n```"
            events.append(Event(wall_time=now, step=step, summary=summary.text("config", text)))
        self._write(events)

    def _write(self, events: Iterable[Any]) -> None:
        try:
            self._file.write(b"".join(_frame(event.SerializeToString()) for event in events))
            if not self._is_remote or time.monotonic() - self._sent >= _UPLOAD_EVERY:
                self._file.flush()
                self._sent = time.monotonic()
        except OSError:
            self._close()  # or Python complains again when it closes the file
            raise

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    __del__ = _close


def _frame(record: bytes) -> bytes:
    """Encode a record of an event file: its length, a checksum, its bytes, another checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))
