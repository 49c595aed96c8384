"""Iterators that save their position: Grain's, torch's and Hugging Face's, as well as plain ones, which are counted.

A position is what `Batches.position` shows and a checkpoint stores, in a form that JSON holds:

    7                                        a plain iterator: 7 batches were given out
    {"batches": 7, "state": {...}}           one that saves its state in a dictionary
    {"batches": 7, "base64": "eyJ..."}       one that saves it in bytes, as Grain's DataLoader does
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
    """Make batches of what an iterable gives, in turn.

    Args:
      iterable: gives NumPy batches. It, or the iterator made of it, may save its state.
      place: puts a NumPy batch on the devices.
      start: a position, or a number of batches, which are read and dropped.
      prefetch: the number of batches to make ahead.

    Raises:
      ValueError: `start` is no position, or lies before the batch at which an iterator was opened.
      TypeError: `start` holds a state, but the iterator can't take one.
    """
    once = isinstance(iterable, Iterator) and _state_of(iterable) is None
    opened_at: dict[str, Any] | None = None  # the position in which an iterator came: its only way back

    def open(start: Any) -> tuple[Read, Any]:
        nonlocal opened_at
        saved, skipped = (start, 0) if isinstance(start, Mapping) else (None, to_step(start))
        if saved is None and opened_at is not None:
            # Opened again at a number: an iterator goes back to where it came, and on from there.
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
            # Before `place`, which takes a while: some iterators go on in threads of their own.
            after = position(number)
            return place(batch), after

        return map(read, iterator, itertools.count(given + 1)), position(given)

    return Batches(open, start, prefetch, once=once)


def to_step(start: Any) -> int:
    """Convert a start to a number of steps. A negative one is a ValueError."""
    step = int(start)
    if step < 0:
        raise ValueError(f"batches: start must be 0 or more, got {step}")
    return step


class _State(NamedTuple):
    """The methods with which an object saves and restores its position."""

    save: Callable[[], Any]
    restore: Callable[[Any], Any]


def _open_iterator(
    iterable: Iterable[PyTree], saved: Mapping[str, Any] | None
) -> tuple[Iterator[PyTree], _State | None]:
    """Make an iterator, at a saved position if there is one; return it with the way to save its state."""
    if (state := _state_of(iterable)) is not None:
        _restore(state, saved)  # before `iter`: torch's loaders begin there
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
    """Return the methods of an iterable or an iterator: Grain's, or torch's and Hugging Face's; None without any."""
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
    """A state under a key that says how it is written; a copy, since some iterators go on changing theirs."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"state": copy.deepcopy(state)}
