"""The matching of collectives with promises: each promise covers so many executions and no more.

Compilers rewrite shapes, so an array is known by its number of elements, its axes and its kind of collective. What it
takes has the promised dtype, else a wider one, and only if nothing is left of these a narrower one:

    promised    all-gather over data, 8 x 4, twice: weight w     an allowance of 2 executions of 32 elements
    found       all-gather over data, f32[4, 8], once            takes 1, leaves 1
    found       all-gather over data, f32[2, 8, 4], once         64 elements: takes 2 if w is one block of a stack of 2,
                                                                 else it is not covered
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.expected import Expected, Shape, normal_shape
from jaxshard.checks.collectives.found import Collective, arrays_only
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import first_words

_SCALARS = 16
"""Elements of no promise that may be joined with arrays."""
_MAX_SUMS = 1 << 16
"""Sums of promises that are tried for one joined array at most."""
_STANDS_FOR = {"all-reduce": ("reduce-scatter", "all-gather")}
"""A compiler may reduce everywhere and slice, or add up arrays that are zero elsewhere."""


@dataclass
class Allowance:
    """The executions promised of arrays that can't be told apart in a program, and how many of them are used up.

    These are of one kind, over the same axes, with as many elements and blocks; the compiler changes their shapes. Of
    pooled promises an execution is one element, and `stack` is 0.
    """

    kind: str
    axes: tuple[str, ...]
    elements: tuple[int, int]
    stack: int
    dtype: str
    least: int = 0
    most: int = 0
    used: int = 0
    what: list[str] = field(default_factory=list)
    forms: set[tuple[int, Shape]] = field(default_factory=set)

    def add(self, one: Expected) -> None:
        """Add what is promised of one more array."""
        assert one.shape is not None and one.most is not None
        self.least += one.least
        self.most += one.most if self.stack else one.most * one.elements[1]
        if one.name not in self.what:
            self.what.append(one.name)
        self.forms |= {(1, normal_shape(one.shape)), (one.stack, normal_shape((one.stack, *one.shape)))}

    def fitting(self, elements: int) -> Iterator[int]:
        """Yield how many promised executions one of an array of so many elements may stand for."""
        least, most = self.elements
        for times in dict.fromkeys((1, self.stack)) if self.stack else (elements,):
            if times * least <= elements <= times * most:
                yield times


class Allowances:
    """The executions that are left of every promise."""

    def __init__(self, expected: Iterable[Expected]) -> None:
        self._expected = tuple(expected)
        # Promises without a number: "as needed" covers any number of executions.
        self._open = [one for one in self._expected if one.shape is None or not one.axes]
        self._counted: dict[tuple[Any, ...], Allowance] = {}
        self._covered: set[str] = set()  # the names of arrays of which something was found, in any form
        self.as_needed: list[tuple[Expected, Collective]] = []
        for one in self._expected:
            if one.shape is not None and one.axes and one.most:
                size, stack = ((1, 1), 0) if one.pooled else (one.elements, one.stack)
                key = (one.kind, one.axes, size, stack, one.wire_dtype)
                self._counted.setdefault(key, Allowance(*key)).add(one)

    def take(self, array: Collective, *, as_other: bool = False, narrower: bool = False) -> Allowance | None:
        """Use up what was promised of an array, for all its executions.

        Args:
          array: what the program moves, a collective of one array.
          as_other: look among the promises of the kinds that it may stand for, not of its own.
          narrower: look among the promises of a wider dtype than it has, not of its own or a narrower one.

        Returns:
          What covers it; None, and nothing is used up, if no promise has room for all executions.
        """
        for kind in _STANDS_FOR.get(array.kind, ()) if as_other else (array.kind,):
            for times, known in self._fitting(kind, array):
                used = known.most + 1 if array.count is None else known.used + times * array.count
                if used <= known.most and _is_narrower(array.dtype, known.dtype) is narrower:
                    known.used = used
                    self._covered.update(known.what)
                    return known
        if not as_other and not narrower:
            for one in self._open:
                if _covers(one, array):
                    self.as_needed.append((one, array))
                    return Allowance(array.kind, array.axes, (0, array.elements), 1, "")
        return None

    def take_joined(self, array: Collective) -> bool:
        """Use up what was promised of several arrays whose sum the compiler moves end to end, as a GPU's joins them.

        A few elements may be of no promise: the loss, its weight, metrics.

        Args:
          array: what the program moves: an all-reduce of one dimension is looked at.

        Returns:
          False, and nothing is used up, if no promises add up to it.
        """
        if array.kind != "all-reduce" or len(array.shapes[0]) != 1 or not array.count:
            return False
        sought = (array.kind, array.axes, array.dtype)
        parts = [known for known in self._counted.values() if (known.kind, known.axes, known.dtype) == sought]
        # Every number of elements that some of the promises add up to, with one choice of executions that does.
        sums: dict[int, tuple[tuple[Allowance, int], ...]] = {0: ()}
        for known in (known for known in parts if known.stack and known.elements[0] == known.elements[1]):
            size, room = known.elements[0], (known.most - known.used) // array.count
            for total, chosen in tuple(sums.items())[:_MAX_SUMS]:
                for some in sorted({*range(1, min(room, 64) + 1), min(known.stack, room), room}):
                    if total + some * size <= array.elements:
                        sums.setdefault(total + some * size, (*chosen, (known, some)))
        if array.elements - (best := max(sums)) > _SCALARS or not best:
            return False
        for known, some in sums[best]:
            known.used += some * array.count
            self._covered.update(known.what)
        return True

    def _fitting(self, kind: str, array: Collective) -> list[tuple[int, Allowance]]:
        """The allowances that an array may fall under, and how many promised executions one of its own stands for.

        That is one, or as many as there are blocks where the compiler joined those of a loop. Several arrays of a model
        often have as many elements: those of the same dtype come first, of these those of the same shape, then the
        smallest, so that room is left for arrays that were padded, and an array by itself before joined ones.
        """
        shape = normal_shape(array.shapes[0])

        def order(fit: tuple[int, Allowance]) -> tuple[bool, bool, bool, int, int]:
            times, known = fit
            other_form = (times, shape) not in known.forms
            return not known.stack, known.dtype != array.dtype, other_form, times * known.elements[1], times

        alike = [known for known in self._counted.values() if (known.kind, known.axes) == (kind, array.axes)]
        return sorted(((times, known) for known in alike for times in known.fitting(array.elements)), key=order)

    def explain(self, array: Collective) -> str:
        """Return what was promised of an array of this size over these axes, if anything."""
        kinds = (array.kind, *_STANDS_FOR.get(array.kind, ()))
        fitting = [known for kind in kinds for _, known in self._fitting(kind, array) if known.stack]
        if not fitting:
            return f"nothing of {array.elements:,} elements is promised there"
        names = [name for known in fitting for name in known.what]
        times = sum(known.most for known in fitting)
        return f"more often than promised: {times} times for {first_words(names)}"

    def missing(self) -> Iterator[str]:
        """Yield what was sure to happen and happened less often; an all-reduce that stood for another kind counts."""
        for known in self._counted.values():
            if known.used < known.least:
                yield (
                    f"{known.kind} over {'+'.join(known.axes)} of {known.elements[1]:,} elements, {known.used} times "
                    f"instead of {known.least}: {', '.join(known.what[:3])}"
                )

    def unread(self, found: Iterable[Collective], instead: Iterable[Collective]) -> Iterator[str]:
        """Yield the kinds of promised collectives for which a program has neither a byte nor a substitute.

        Either the compiler writes them in a form that the parser does not know, or they do not happen.

        Args:
          found: all collectives of the program.
          instead: arrays that no promise with a number covers. Where such arrays move over an axis, they may do so in
            place of promised ones: a product with parts of a weight sums activations, and needs no gather.
        """
        promised: Counter[tuple[str, tuple[str, ...]]] = Counter()
        seen = {(one.kind, one.axes) for one in arrays_only(found)}
        moved = {axis for one in arrays_only(instead) for axis in one.axes}
        for one in self._expected:
            if one.is_counted:
                promised[one.kind, one.axes] += one.bytes or 0
                if one.name in self._covered or moved & set(one.axes):
                    seen.add((one.kind, one.axes))
        for (kind, axes), size in promised.items():
            if size and (kind, axes) not in seen:
                over = f"{kind} over {'+'.join(axes)}: {human_bytes(size)} promised"
                yield f"{over}, and neither these nor a substitute are in the program that was read"


def _is_narrower(found: str, promised: str) -> bool:
    """Return True if floats travel in fewer bits than promised."""
    both = bool(promised) and found.startswith(("f", "bf"))
    return both and hlo.bits_of(found) < hlo.bits_of(promised)


def _covers(one: Expected, array: Collective) -> bool:
    """Return True if a promise without a number of executions covers the array."""
    if one.kind != array.kind or (one.axes and not set(array.axes) <= set(one.axes)):
        return False
    most = one.limit if one.shape is None else math.prod(one.shape)
    return most is None or array.elements <= most
