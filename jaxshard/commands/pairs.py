"""Flags whose values have parts, such as `--lora rank=8,base=int8`; the parts may be the arguments of a function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxshard.commands.values import Read, read_choice, read_number, read_switch
from jaxshard.core.near_words import one_of

_BY_TYPE: dict[type, Read] = {
    bool: read_switch,
    int: read_number(int, -math.inf, "a whole number"),
    float: read_number(float, -math.inf, "a finite number"),
}


def read_pairs(
    flag: str,
    text: str,
    readers: Mapping[str, Read] | Read,
    syntax: str,
    *,
    repeated: Sequence[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Read a flag's value that consists of pairs name=value, such as "rank=8,match=up/kernel", to a dictionary.

        >>> read_pairs("--mesh", "data=4,tensor=2", int, "write each axis once")
        {'data': 4, 'tensor': 2}

    Args:
      flag: the name of the flag, for error messages.
      text: the value: pairs with commas between them.
      readers: for each allowed name a function from text to value; or one such function, which allows any name.
      syntax: how to write the value, for error messages.
      repeated: the names that may occur more than once; their values become lists.
      elsewhere: for names that another library has for the same things, what to write here.

    Returns:
      The values by name, in the order of the text.

    Raises:
      ValueError: a pair is not name=value, a name is unknown or occurs twice, or a value is refused.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        try:
            if not name or not value:
                raise ValueError("is not name=value")
            if isinstance(readers, Mapping) and name not in readers:
                raise ValueError(f"there is no {name}; {(elsewhere or {}).get(name) or one_of(name, readers)}")
            if name in found and name not in repeated:
                raise ValueError(f"{name} comes twice")
            read = readers[name] if isinstance(readers, Mapping) else readers
            found[name] = [*found.get(name, []), read(value)] if name in repeated else read(value)
        except ValueError as error:
            which = "" if part == text else f"{part.strip()!r}: "
            raise ValueError(f"{flag} {text}: {which}{error}; {syntax}") from error
    return found


def readers_of(function: Callable[..., Any]) -> dict[str, Read]:
    """Return {argument: function from text to value} for a function, by annotations or defaults of its arguments."""
    try:
        hints = get_type_hints(function)
    except NameError:  # a library may import the types of its annotations for type checkers alone
        hints = {}
    parameters = inspect.signature(function).parameters.values()
    return {one.name: _reader_of(hints.get(one.name), one.default) for one in parameters}


def read_literal(text: str) -> Any:
    """Convert text to a number, or to True or False; return any other text unchanged."""
    for read in (int, float, read_switch):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _reader_of(hint: Any, default: Any) -> Read:
    kinds = [one for one in get_args(hint) or (hint,) if one is not type(None)]
    if get_origin(hint) is Literal or (len(kinds) == 1 and get_origin(kinds[0]) is Literal):
        return read_choice(get_args(hint) if get_origin(hint) is Literal else get_args(kinds[0]))
    kind = kinds[0] if len(kinds) == 1 else type(default)
    return _BY_TYPE.get(kind, _BY_TYPE.get(type(default), read_literal))
