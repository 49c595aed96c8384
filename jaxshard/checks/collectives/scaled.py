"""What a step moves of weights and gradients in a format of `js.wire`: 8-bit numbers, and a scale for each block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from jaxshard.checks.collectives.expected import Expected
from jaxshard.core.scaled_collectives import Travel


def as_travels(one: Expected, travels: Iterable[Travel]) -> Iterator[Expected]:
    """Yield `one` for each of the arrays as which it travels."""
    for travel in travels:
        yield replace(one, kind=travel.kind, axes=travel.axes, shape=travel.shape, dtype=travel.dtype)
