"""`Writer`: a callback of `fit` that writes records somewhere, and the numbers of a record in one flat dict."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jaxshard.training.records import Record


class Writer(Protocol):
    """A callback of `js.fit` that is given the record of every step. Any function of a record is one.

    A writer may also have a method `finish(error)`. `js.fit` calls it once at its end, with the exception that ended
    the training or None, so that a file or a connection is closed. What it closed is opened again by a later record.

    Example:
        def write(record: js.Record) -> None:
            print(js.metrics.flat(record))
    """

    def __call__(self, record: Record, /) -> Any:
        """Take the numbers of one step."""


@contextlib.contextmanager
def finishing(callbacks: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Tell the callbacks that have a method `finish` when the block ends, and by which exception if it failed.

    Where the block failed, what a callback raises is added to that exception as a note, so as not to hide it.
    """
    found: list[Any] = [getattr(callback, "finish", None) for callback in callbacks]
    finishes = [finish for finish in found if callable(finish)]
    try:
        yield
    except BaseException as error:
        for finish in finishes:
            try:
                finish(error)
            except Exception as another:
                error.add_note(f"a callback could not be closed either: {another}")
        raise
    for finish in finishes:
        finish(None)


def flat(record: Record) -> dict[str, float]:
    """Collect all numbers of a record in one flat dict.

    Args:
      record: a step.

    Returns:
      "step", "seconds", the metrics and the speed by their names, and the evaluation as "eval/loss" and so on.

    Example:
        >>> flat(Record(step=3, metrics={"loss": 2.5}, seconds=0.5, speed={}))["loss"]
        2.5
    """
    evaluation = {f"eval/{name}": value for name, value in (record.evaluation or {}).items()}
    return {"step": record.step, "seconds": record.seconds, **record.metrics, **record.speed, **evaluation}


def finite(value: float) -> float | None:
    """Return the number, or None if it is infinite or not a number.

    Example:
        >>> finite(0.5), finite(float("nan"))
        (0.5, None)
    """
    return value if math.isfinite(value) else None
