"""Explain the mistake js.fsdp("x", "y") for js.fsdp(("x", "y")) in functions that make strategies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

Maker = TypeVar("Maker", bound=Callable[..., Any])


def axes_in_a_tuple(make: Maker) -> Maker:
    """Decorate a function that makes a strategy to raise a TypeError that asks for several mesh axes as one tuple.

    Python's own TypeError would only give the number of arguments.
    """
    positional = [one for one in inspect.signature(make).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    count, name = len(positional), make.__name__

    @functools.wraps(make)
    def checked(*given: Any, **options: Any) -> Any:
        if len(given) > count and all(isinstance(one, str) for one in given):
            right = ", ".join(map(repr, (*given[: count - 1], given[count - 1 :])))
            raise TypeError(
                f"{name}({', '.join(map(repr, given))}): several mesh axes for one dimension are a tuple; write "
                f"js.{name}({right}). What splits over an axis in another way is a strategy of its own, such as "
                f"js.compose(js.{name}(...), js.tensor())"
            )
        return make(*given, **options)

    return cast(Maker, checked)
