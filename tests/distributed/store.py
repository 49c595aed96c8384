"""JAX's key-value store as a dictionary, and threads that take it for the coordinator of several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jaxshard.distributed.agree import Peers


class Store:
    """The methods of JAX's client that the package uses, with its errors."""

    def __init__(self):
        self.notes: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.notes and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.notes[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self.changed:
            if key not in self.notes:
                raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.notes[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.notes, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.notes[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        folder = key.rstrip("/") + "/"
        with self.changed:
            return [(name, text) for name, text in self.notes.items() if name.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for name in [name for name in self.notes if name == key or name.startswith(f"{key}/")]:
                del self.notes[name]


def members(count: int, store: Store | None = None) -> list[Peers]:
    """So many processes, on hosts a, b, c and so on."""
    store = store or Store()
    return [Peers(store, number, range(count), "abcdefghijklmnop"[number]) for number in range(count)]


def together(functions: list[Callable[[], Any]], seconds: float = 60.0) -> list[Any]:
    """What the functions, each in a thread of its own, returned or raised."""
    outcomes: list[Any] = [None] * len(functions)

    def call(number: int) -> None:
        try:
            outcomes[number] = functions[number]()
        except Exception as error:  # whatever it is, the test looks at it
            outcomes[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread waits for ever"
    return outcomes
