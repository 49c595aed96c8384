"""Group arrays by kind: two arrays are of one kind if their paths differ only in the index of a block or layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBERED = re.compile(r"(^|_)\d+$|(?<=^h)\d+$|(?<=^block)\d+$|(?<=^blocks)\d+$|(?<=^layer)\d+$|(?<=^layers)\d+$")


def kind_of(path: str) -> str:
    """Replace the indices of modules in a path by a star.

    >>> kind_of("layers/11/attn/query/kernel"), kind_of("Block_3/fc1/kernel")
    ('layers/*/attn/query/kernel', 'Block_*/fc1/kernel')
    """
    return "/".join(_NUMBERED.sub(r"\1*", word) for word in path.split("/"))


def group_by_kind(
    items: Iterable[T], path_of: Callable[[T], str], rest_of: Callable[[T], Any] = lambda item: None
) -> dict[tuple[str, Any], list[T]]:
    """Group items by the kind of their path; paths are of one kind if they differ only in the index of a layer.

    Args:
      items: the items, such as leaves.
      path_of: returns the path of an item.
      rest_of: returns a further property that items of a group must share, such as their shape.

    Returns:
      {(kind, rest): items}, in the order of the first item of each group. The kind is a path with stars,
      "layers/*/kernel"; in a group of one item it is the path of the item.
    """
    groups: dict[tuple[str, Any], list[T]] = {}
    for item in items:
        groups.setdefault((kind_of(path_of(item)), rest_of(item)), []).append(item)
    return {(kind if len(same) > 1 else path_of(same[0]), rest): same for (kind, rest), same in groups.items()}
