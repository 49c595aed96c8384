"""Add up and format counts and bytes, some of which may be unknown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from jaxshard.core.layout import human_bytes

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def total(numbers: Iterable[int | None]) -> int | None:
    """Add up numbers; return None if one of them is None, which means unknown.

    >>> total([1, 2]), total([1, None])
    (3, None)
    """
    numbers = list(numbers)
    return None if None in numbers else sum(number or 0 for number in numbers)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by `key(item)`; keys are in the order of their first item, items of a group in their own order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def number_str(number: int | None) -> str:
    """Format a number with commas; "?" for None."""
    return "?" if number is None else f"{number:,}"


def bytes_str(size: int | None, unknown: str = "?") -> str:
    """Format bytes in decimal units; return the text `unknown` for None."""
    return unknown if size is None else human_bytes(size)
