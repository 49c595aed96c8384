"""The types of flags: each has a reader, which returns the value of a text or raises a ValueError with the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jaxshard.core.bounds import LARGEST_SIZE
from jaxshard.core.local_path import local_path
from jaxshard.core.near_words import one_of
from jaxshard.storage.paths import AnyPath, as_path

Read = Callable[[str], Any]
"""A function that returns the value of a text, or raises a ValueError that says what to write."""

LARGEST = 2**63
"""The upper bound of whole numbers."""


class Kind(NamedTuple):
    """The kind of a flag's value.

    Attributes:
      metavar: the word that stands for the value in the help, such as "PATH".
      read: a function from the text of a value to the value.
      alias: another name of the flag, such as "-n".
      is_positional: True if the value is given without the name of the flag.
      is_written: True if the value is a file that the command writes.
    """

    metavar: str
    read: Read = str
    alias: str = ""
    is_positional: bool = False
    is_written: bool = False


def read_number(kind: type[int] | type[float], least: float, words: str, bound: int = LARGEST) -> Read:
    """Return a function from text to a number.

    Args:
      kind: the type of the number.
      least: the smallest number that is allowed.
      words: describes the allowed numbers in errors.
      bound: whole numbers are below it.
    """

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            raise ValueError("give a whole number" if kind is int else "give a number") from None
        if not least <= number < (bound if kind is int else math.inf):
            raise ValueError(f"give {words}")
        return number

    return read


def read_choice(words: Sequence[str]) -> Read:
    """Return a function that returns its text if it is one of `words`, and raises ValueError otherwise."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(one_of(text, words))
        return text

    return read


def read_switch(text: str) -> bool:
    """Convert "on" or "true" to True, "off" or "false" to False; raise ValueError for other text."""
    words = {"on": True, "true": True, "off": False, "false": False}
    if text not in words:
        raise ValueError("write on or off")
    return words[text]


read_count = read_number(int, 1, f"a number above 0 and below {LARGEST}")
read_size = read_number(int, 1, f"a number above 0 and at most {LARGEST_SIZE}", LARGEST_SIZE + 1)
read_natural = read_number(int, 0, "a number from 0 to 2**63 - 1")
read_rate = read_number(float, math.ulp(0), "a number above 0 and below infinity")

Count = Annotated[int | None, Kind("N", read_count)]
Size = Annotated[int | None, Kind("N", read_size)]
Step = Annotated[int | None, Kind("N", read_natural)]
Natural = Annotated[int, Kind("N", read_natural)]
Rate = Annotated[float | None, Kind("X", read_rate)]
Real = Annotated[float, Kind("X", read_number(float, -math.inf, "a finite number"))]
Text = Annotated[str | None, Kind("TEXT")]
Texts = Annotated[tuple[str, ...], Kind("TEXT")]
File = Annotated[Path | None, Kind("PATH", local_path)]
Place = Annotated[AnyPath | None, Kind("PATH", as_path)]
Written = Annotated[AnyPath | None, Kind("PATH", as_path, is_written=True)]
Picture = Annotated[Path | None, Kind("PATH", local_path, is_written=True)]
