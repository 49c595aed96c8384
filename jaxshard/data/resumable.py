"""Resume an iterator at a position: by its saved state (Grain, torch, Hugging Face), or by counting batches.

A position is the value of `Batches.position`, which a checkpoint stores as JSON:

    7                                        a plain iterator, after 7 batches
    {"batches": 7, "state": {...}}           an iterator that saves its state in a dictionary
    {"batches": 7, "base64": "eyJ..."}       an iterator that saves its state in bytes, like Grain's DataLoader
"""

from __future__ import annotations

import base64
import copy
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxshard.core.types import PyTree
from jaxshard.data.stream import Batches, Read


def batches_in_turn(
    iterable: Iterable[PyTree], place: Callable[[PyTree], PyTree], start: Any, prefetch: int
) -> Batches:
    """Make `Batches` from an iterable, in its own order.

    Args:
      iterable: yields NumPy batches. The iterable, or `iter(iterable)`, may have methods that save and restore a state.
      place: `place(batch)` copies a NumPy batch to the devices.
      start: a position, or a number of batches to read and drop.
      prefetch: the number of batches to make ahead.

    Raises:
      ValueError: `start` is not a position. Also raised by `seek`, for a position before the first batch of an
        iterator.
      TypeError: `start` contains a state, but the iterator can't restore one.
    """
    once = isinstance(iterable, Iterator) and _state_of(iterable) is None
    opened_at: dict[str, Any] | None = None  # the position at which an iterator was opened; it can't go further back

    def open(start: Any) -> tuple[Read, Any]:
        nonlocal opened_at
        saved, skipped = (start, 0) if isinstance(start, Mapping) else (None, to_step(start))
        if saved is None and opened_at is not None:
            # `seek` to a number of batches: restore the iterator where it was opened, and skip batches from there.
            saved, skipped = opened_at, skipped - opened_at["batches"]
            if skipped < 0:
                raise ValueError(f"batches: {start} lies before batch {saved['batches']}, where they were opened")
        iterator, state = _open_iterator(iterable, saved)
        given = skipped + (0 if saved is None else int(saved["batches"]))
        for _ in itertools.islice(iterator, skipped):
            pass

        def position(given: int) -> Any:
            return given if state is None else {"batches": given, **_to_json(state.save())}

        if isinstance(iterable, Iterator) and state is not None and opened_at is None:
            opened_at = position(given)

        def read(batch: PyTree, number: int) -> tuple[PyTree, Any]:
            # Save the state before `place`, which takes a while: some iterators advance in threads of their own.
            after = position(number)
            return place(batch), after

        return map(read, iterator, itertools.count(given + 1)), position(given)

    return Batches(open, start, prefetch, once=once)


def to_step(start: Any) -> int:
    """Convert `start`, a number or a scalar array, to an int; raise ValueError if it is negative."""
    step = int(start)
    if step < 0:
        raise ValueError(f"batches: start must be 0 or more, got {step}")
    return step


class _State(NamedTuple):
    """The bound methods of an object that save and restore its position: `save() -> state` and `restore(state)`."""

    save: Callable[[], Any]
    restore: Callable[[Any], Any]


def _open_iterator(
    iterable: Iterable[PyTree], saved: Mapping[str, Any] | None
) -> tuple[Iterator[PyTree], _State | None]:
    """Call `iter`, and restore the saved state if there is one; return (iterator, its `_State` or None)."""
    if (state := _state_of(iterable)) is not None:
        _restore(state, saved)  # before `iter`, since torch's loaders start in `iter`
        return iter(iterable), state
    iterator = iter(iterable)
    if (state := _state_of(iterator)) is not None:
        _restore(state, saved)
    elif saved is not None:
        raise TypeError(
            f"batches: a position {reprlib.repr(saved)} for a {type(iterable).__name__}, which has neither get_state "
            "and set_state nor state_dict and load_state_dict; start it at a number of batches"
        )
    return iterator, state


def _state_of(holder: Any) -> _State | None:
    """Return the methods of an object that save and restore its state, or None if it has no such methods."""
    for save, restore in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(holder, save) and hasattr(holder, restore):
            return _State(getattr(holder, save), getattr(holder, restore))
    return None


def _restore(state: _State, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        return
    if "batches" not in saved or ("state" in saved) == ("base64" in saved):
        raise ValueError(f'batches: {reprlib.repr(saved)} is no position; expected {{"batches": ..., "state": ...}}')
    state.restore(copy.deepcopy(saved["state"]) if "state" in saved else base64.b64decode(saved["base64"]))


def _to_json(state: Any) -> dict[str, Any]:
    """Convert an iterator's state to a JSON object: {"base64": text} for bytes, {"state": state} for others.

    The state is copied, since some iterators change it in place.
    """
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"state": copy.deepcopy(state)}
