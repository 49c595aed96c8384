"""Failures that a process reports before it ends, so that nobody waits for it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from jaxshard.core.compat import coordinator_client, list_keys, process_count_and_id, put_key

_FAILED = "jaxshard/failed/"
_REPORT_WITHIN = 2.0
"""Seconds that `report_failure` may take: a store that does not answer must not keep a process from ending."""


def report_failure(why: str) -> None:
    """Tell the processes that wait for this one that it won't come. In a single process, do nothing.

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
    """Return (name of the process, why) of every process that reported a failure."""
    return [(name, why) for name, why in map(json.loads, list_keys(store, _FAILED).values())]
