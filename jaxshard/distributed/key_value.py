"""Notes that every process can read: the key-value store of JAX's coordinator, or one with its methods."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from jaxshard.core.compat import coordinator, joined

FAILED = "jaxshard/failed/"
"""Where processes say that they failed."""
_TELL_WITHIN = 2.0
"""Seconds in which they must have said it: a store that does not answer keeps nobody from ending."""


def put(store: Any, key: str, value: str, *, overwrite: bool = False) -> None:
    """Leaves a note under a key."""
    store.key_value_set(key, value, allow_overwrite=overwrite)


def wait(store: Any, key: str, seconds: float) -> str | None:
    """The note under a key, waited for so long; None if it did not come."""
    try:
        return str(store.blocking_key_value_get(key, max(1, int(1000 * seconds))))
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def look(store: Any, key: str) -> str | None:
    """The note under a key; None without one."""
    try:
        return str(store.key_value_try_get(key))
    except RuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def tell_failure(why: str) -> None:
    """Leaves a note for those who wait for this process at a point that it won't reach; nothing in one process."""
    store = coordinator()
    if store is None:
        return
    index = joined()[1]
    note = json.dumps([f"process {index} (host {socket.gethostname()})", why])

    def leave_note() -> None:
        with contextlib.suppress(RuntimeError):  # it is there already, or the store is gone
            put(store, f"{FAILED}{index}", note)

    thread = threading.Thread(target=leave_note, daemon=True)
    thread.start()
    thread.join(_TELL_WITHIN)
