"""Numbers of executions and of bytes added up, some of which a program does not tell."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from jaxshard.core.layout import human_bytes

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def total(numbers: Iterable[int | None]) -> int | None:
    """Add up numbers; None where one of them is not known.

    >>> total([1, 2]), total([1, None])
    (3, None)
    """
    numbers = list(numbers)
    return None if None in numbers else sum(number or 0 for number in numbers)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Put items of the same key together, in the order in which keys and items come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def number_str(number: int | None) -> str:
    """Write a number with commas, "?" for one that is not known."""
    return "?" if number is None else f"{number:,}"


def bytes_str(size: int | None, unknown: str = "?") -> str:
    """Write a number of bytes in decimal units."""
    return unknown if size is None else human_bytes(size)
