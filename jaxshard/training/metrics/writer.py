"""`Writer`, the type of callbacks of `fit`; `flat`, which collects the numbers of a record in a flat dict."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jaxshard.training.records import Record


class Writer(Protocol):
    """A callback of `js.fit` that receives the record of every step; any function of a record is a writer.

    A writer may also have a method `finish(error)`. `js.fit` calls it once at its end, with the exception that ended
    the training or None, so that it can close a file or connection. If it is called with another record afterwards, it
    must open the file or connection again.

    Example:
        def write(record: js.Record) -> None:
            print(js.metrics.flat(record))
    """

    def __call__(self, record: Record, /) -> Any:
        """Write the record of one step."""


@contextlib.contextmanager
def finishing(callbacks: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Call the `finish` methods of callbacks when the `with` block ends, with the exception if the block failed.

    If the block failed, its exception is raised, and exceptions of `finish` methods are added to it as notes.
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
      record: the record of a step.

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
