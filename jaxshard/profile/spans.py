"""Arithmetic with spans of time, each a pair (start, end)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[float, float]


def merge(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch or overlap.

    >>> merge([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def gaps(merged: list[Span], window: Span) -> list[Span]:
    """Return the parts of a window that merged spans leave free.

    >>> gaps([(0, 3), (4, 6)], (2, 8))
    [(3, 4), (6, 8)]
    """
    at, end = window
    free = []
    for busy_from, busy_until in merged[max(0, bisect_right(merged, (at, at)) - 1) :]:
        if busy_from >= end:
            break
        if busy_from > at:
            free.append((at, busy_from))
        at = max(at, busy_until)
    return [*free, (at, end)] if at < end else free


def length(spans: Iterable[Span]) -> float:
    """Add up the lengths of spans."""
    return sum(end - start for start, end in spans)
