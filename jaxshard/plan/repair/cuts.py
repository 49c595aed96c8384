"""Dimensions that an operation cuts or folds, so that their parts are no longer those of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any


def cut_sizes(eqn: Any, parts: int) -> Iterator[int]:
    """Yield the sizes of the dimensions that an equation cuts elsewhere than a split into equal parts does.

    These are dimensions that are sliced, joined or reversed, and those that a reshape folds or unfolds where the outer
    dimension is no multiple of `parts`: [36] to [3, 12] and back for two parts, but not [48] to [4, 12].
    """
    name, params = eqn.primitive.name, eqn.params
    shapes = [tuple(var.aval.shape) for var in (*eqn.invars[:1], *eqn.outvars[:1]) if hasattr(var.aval, "shape")]
    if len(shapes) != 2:
        return
    old, new = shapes
    if name == "reshape":
        yield from _folded(old, new, parts)
        yield from _folded(new, old, parts)
    elif name in ("split", "slice", "dynamic_slice"):
        yield from (size for size, kept in zip(old, new) if size != kept)
    elif name == "concatenate":
        yield new[params["dimension"]]
    elif name == "rev":
        yield from (old[dim] for dim in params["dimensions"])


def _folded(whole: Sequence[int], unfolded: Sequence[int], parts: int) -> Iterator[int]:
    """The sizes in `whole` that `unfolded` has as several dimensions, of which the first is no multiple of `parts`."""
    for dim, size in enumerate(whole):
        before = math.prod(whole[:dim])
        ends = [math.prod(unfolded[:count]) for count in range(len(unfolded) + 1)]
        if before in ends and before * size in ends:
            inner = [one for one in unfolded[ends.index(before) : ends.index(before * size)] if one > 1]
            if len(inner) > 1 and inner[0] % parts:
                yield size
