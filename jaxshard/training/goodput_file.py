"""The file of a goodput ledger: in the folder of checkpoints, rewritten at least once a second.

A later process goes on with it. In an object store it is rewritten every 10 seconds. A thread writes it, so that it is
up to date even while the training waits for data or compiles. What goes wrong with it is a warning, and never stops the
training. This file does not import JAX, for the launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxshard.core.launch_environment import GOODPUT
from jaxshard.storage.paths import AnyPath, ObjectPath, replace_file
from jaxshard.training.goodput import KINDS, Account, Goodput, Ledger

LEDGER = ".goodput.json"
"""The name of the file in a folder of checkpoints."""

_FORMAT = 1
_INTERVAL = 0.5
"""Seconds between two writes."""
_REMOTE_INTERVAL = 10.0
"""Seconds between two writes into an object store, where each costs a request."""
_FAREWELL = 10.0
"""Seconds for which the end of a training waits for a write that hangs."""
_LARGEST = 1 << 20
"""Bytes of the largest file that is read; ours have a few kilobytes."""

_ledgers = itertools.count()
"""Counts the ledgers of this process."""


def read_ledger(file: AnyPath | None, step: int, *, compiled: float) -> Ledger:
    """Return the ledger of a training, which goes on with the account in its file, if there is one.

    Args:
      file: the file; None for a ledger in memory alone.
      step: the number of steps that the run has taken.
      compiled: how many seconds of this process went into compiling the step already.
    """
    past = None if file is None else _read_or_warn(file)
    if next(_ledgers) > 0:  # the time before the first `fit` of a process counts once
        return Ledger(step, past=past)
    return Ledger(step, past=past, age=process_age(), compiled=compiled)


def read_goodput(file: AnyPath) -> Goodput | None:
    """Read the goodput in the file of a ledger, or None if there is no file.

    Raises:
      ValueError: the file is damaged, or no ledger.
      OSError: it can't be read.
    """
    account = _read(file)
    return None if account is None else Goodput(account.seconds)


def place_for_launch(file: AnyPath | None) -> AnyPath | None:
    """Tell `jaxshard launch` where the ledger is, and return its file.

    Args:
      file: the file in the folder of checkpoints, to which the launcher's path becomes a link; None without a folder:
        then the ledger is written to the launcher's path itself, if there is one.
    """
    launch = os.environ.get(GOODPUT)
    if launch is None:
        return file
    if file is not None:
        with contextlib.suppress(OSError):  # then the launch ends without its line, as for a file in an object store
            Path(launch).unlink(missing_ok=True)
            Path(launch).symlink_to(file)
    return file or Path(launch)


def process_age() -> float:
    """Return the seconds since this process was started; 0 in an interactive session, and if the system is not Linux.

    In an interactive session, most of these seconds are those of a person at the keyboard.
    """
    if hasattr(sys, "ps1") or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in clock ticks since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


@contextlib.contextmanager
def kept_on_disk(ledger: Ledger, file: AnyPath | None) -> Iterator[None]:
    """Keep the file of a ledger up to date, by a thread, until the `with` block ends; do nothing without a file."""
    if file is None:
        yield
        return
    closed, problems = threading.Event(), list[OSError]()
    thread = threading.Thread(target=_write_until, args=(closed, ledger, file, problems), name="goodput", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_FAREWELL)
        if problems or thread.is_alive():
            why = (problems[0].strerror or problems[0]) if problems else f"a write takes longer than {_FAREWELL:.0f} s"
            warnings.warn(
                f"fit: the goodput ledger {file} is not up to date: {why}; the training is not affected", stacklevel=4
            )


def _write_until(closed: threading.Event, ledger: Ledger, file: AnyPath, problems: list[OSError]) -> None:
    """Write the ledger again and again, a last time when `closed` is set; leave the error of the last write."""
    interval = _REMOTE_INTERVAL if isinstance(file, ObjectPath) else _INTERVAL
    while True:
        is_last = closed.is_set()
        problems.clear()
        try:
            _write(file, ledger.account())
        except OSError as error:
            problems.append(error)
        if is_last:
            return
        closed.wait(interval)


def _write(file: AnyPath, account: Account) -> None:
    """Replace the file at once, so that a reader or a kill never meets half of it."""
    replace_file(file, json.dumps({"format": _FORMAT} | account._asdict()).encode())


def _read_or_warn(file: AnyPath) -> Account | None:
    """Read an account; for a file that is none, warn and return None."""
    try:
        return _read(file)
    except (OSError, ValueError) as error:
        warnings.warn(f"fit: a new goodput ledger replaces the one that can't be read: {error}", stacklevel=5)
        return None


def _read(file: AnyPath) -> Account | None:
    if not file.exists():
        return None
    if not file.is_file() or (isinstance(file, Path) and file.stat().st_size > _LARGEST):
        raise ValueError(f"{file}: this is not the ledger that js.fit writes")
    try:
        return _decode(json.loads(file.read_bytes()))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file}: this is not the ledger that js.fit writes, or it is damaged: {error}") from None


def _decode(found: Any) -> Account:
    """Return the account in a JSON value; raise ValueError, KeyError or TypeError if it is none."""
    if found["format"] != _FORMAT:
        raise ValueError(f"format {found['format']}, known is {_FORMAT}")
    seconds = {kind: float(found["seconds"][kind]) for kind in KINDS}
    marks = tuple((int(step), float(spent)) for step, spent in found["marks"])
    written = float(found["written"])
    numbers = [*seconds.values(), *itertools.chain.from_iterable(marks), written]
    if not marks or any(not math.isfinite(number) or number < 0 for number in numbers):
        raise ValueError("negative or infinite seconds, or no steps")
    if list(marks) != sorted(marks):
        raise ValueError("its steps are not in order")
    return Account(seconds, marks, written, bool(found["ended"]))
