"""The key-value store of JAX's coordinator, in which processes leave notes for each other.

Process 0 holds the store; every process reads and writes it through the client that `core.compat.coordinator` returns.
It works while devices are busy and while the main thread of a process hangs in a collective. All values are text.

The keys of this package, with process numbers <p> and counters <n>:

    jaxshard/host/<p>             the host name of a process                     agree.py
    jaxshard/agree/<peers>/<n>/   what is compared at one point of the program   agree.py
    jaxshard/failed/<p>           a process that ends by an error, and why       here
    jaxshard/stop/<n>/            after which step a run stops                   preemption.py
    jaxshard/watch/<n>/           signs of life and alarms                       watchdog.py
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from jaxshard.core.compat import coordinator_client, process_count_and_id

_FAILED = "jaxshard/failed/"
_REPORT_WITHIN = 2.0
"""Seconds that `report_failure` may take: a store that does not answer must not keep a process from ending."""


def put_key(store: Any, key: str, value: str, *, overwrite: bool = False) -> None:
    """Stores a value under a key.

    Raises:
      RuntimeError: the key is there already and `overwrite` is False, or the store can't be reached.
    """
    store.key_value_set(key, value, allow_overwrite=overwrite)


def get_key(store: Any, key: str) -> str | None:
    """Returns the value of a key, or None if it is not there."""
    try:
        return str(store.key_value_try_get(key))
    except RuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait_for_key(store: Any, key: str, seconds: float) -> str | None:
    """Returns the value of a key as soon as it is there, or None if it has not come within `seconds`."""
    try:
        return str(store.blocking_key_value_get(key, max(1, int(1000 * seconds))))
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def list_keys(store: Any, folder: str) -> dict[str, str]:
    """Returns {last part of the key: value} of all keys below `folder`, which ends in a slash."""
    return {key.rsplit("/", 1)[1]: value for key, value in store.key_value_dir_get(folder)}


def delete_keys(store: Any, key: str) -> None:
    """Deletes a key and all keys below it."""
    store.key_value_delete(key)


def report_failure(why: str) -> None:
    """Tells the processes that wait for this one that it won't come; does nothing in a single process.

    Only the first report of a process counts. Returns after two seconds even if the store does not answer.
    """
    store = coordinator_client()
    if store is None:
        return
    process = process_count_and_id()[1]
    note = json.dumps([f"process {process} (host {socket.gethostname()})", why])

    def report() -> None:
        with contextlib.suppress(RuntimeError):  # reported before, or the store is gone
            put_key(store, f"{_FAILED}{process}", note)

    # A thread: a call to a store that has died would block for minutes.
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    thread.join(_REPORT_WITHIN)


def list_failures(store: Any) -> list[tuple[str, str]]:
    """Returns (name of the process, why) of every process that reported a failure."""
    return [(name, why) for name, why in map(json.loads, list_keys(store, _FAILED).values())]
