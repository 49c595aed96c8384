"""Match the collectives of a program with promises, each of which covers a limited number of executions.

Compilers rewrite shapes, so an array is identified by its number of elements, its axes and its kind of collective. A
promise in the array's dtype matches first, then one in fewer bits, and one in more bits only if asked for:

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

from jaxshard.checks.collectives.expected import Expected, Shape, normal_shape
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import first_words
from jaxshard.hlo import hlo
from jaxshard.hlo.found import Collective, arrays_only

_SCALARS = 16
"""The most unpromised elements, of scalars, in an all-reduce of joined arrays."""
_MAX_SUMS = 1 << 16
"""The most sums of promises that are tried for one joined array."""
_STANDS_FOR = {"all-reduce": ("reduce-scatter", "all-gather")}
"""The kinds that a kind may replace: a compiler may reduce and slice, or gather by adding arrays of mostly zeros."""


@dataclass
class Allowance:
    """Promised collectives that look alike in a compiled program, and how many of their executions were found.

    They have the same kind, axes, dtype, number of elements and number of stacked blocks. Their shapes may differ,
    because compilers change shapes. For promises with `Expected.pooled` elements are counted instead of executions.

    Attributes:
      kind: one of `found.KINDS`.
      axes: the mesh axes.
      elements: the fewest and the most elements of an array.
      stack: the number of stacked blocks. The compiler may join their executions, one for each block, into a single
        execution. 0 for promises with `Expected.pooled`.
      dtype: the dtype that is sent.
      least: the fewest executions per step.
      most: the most executions per step.
      used: the executions that were found.
      what: the arrays in words.
      forms: pairs (times, shape): one found execution on an array of this shape stands for `times` promised executions.
        Arrays of these shapes are matched first.
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
        """Add the executions of one more promised collective that looks like the others."""
        assert one.shape is not None and one.most is not None
        self.least += one.least
        self.most += one.most if self.stack else one.most * one.elements[1]
        if one.name not in self.what:
            self.what.append(one.name)
        self.forms |= {(1, normal_shape(one.shape)), (one.stack, normal_shape((one.stack, *one.shape)))}

    def fitting(self, elements: int) -> Iterator[int]:
        """Yield how many promised executions may match one found execution on an array of `elements` elements.

        The number is 1, or the number of stacked blocks if the compiler joined their executions.
        """
        least, most = self.elements
        for times in dict.fromkeys((1, self.stack)) if self.stack else (elements,):
            if times * least <= elements <= times * most:
                yield times


class Allowances:
    """All promised collectives, and how many promised executions of each are not matched yet."""

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

    def take(self, array: Collective, *, as_other: bool = False, fewer_bits: bool = False) -> Allowance | None:
        """Match a collective of the program with a promise, and count its executions as used.

        Args:
          array: a collective of one array.
          as_other: match a promise of another kind that this collective may replace, not of its own kind.
          fewer_bits: match a promise that has more bits per element than the array, not one with as many or fewer.

        Returns:
          The matching allowance. None if no promise has enough executions left; then nothing is counted.
        """
        for kind in _STANDS_FOR.get(array.kind, ()) if as_other else (array.kind,):
            for times, known in self._fitting(kind, array):
                used = known.most + 1 if array.count is None else known.used + times * array.count
                if used <= known.most and _has_fewer_bits(array.dtype, known.dtype) is fewer_bits:
                    known.used = used
                    self._covered.update(known.what)
                    return known
        if not as_other and not fewer_bits:
            for one in self._open:
                if _covers(one, array):
                    self.as_needed.append((one, array))
                    return Allowance(array.kind, array.axes, (0, array.elements), 1, "")
        return None

    def take_joined(self, array: Collective) -> bool:
        """Match an all-reduce of several arrays that a GPU compiler concatenated, and count all of them as used.

        It may also contain a few scalars that are not promised: the loss, its weight, metrics.

        Args:
          array: a collective of one array; only an all-reduce of one dimension can match.

        Returns:
          True if the sizes of some promised arrays add up to its size; if False, nothing is counted.
        """
        if array.kind != "all-reduce" or len(array.shapes[0]) != 1 or not array.count:
            return False
        sought = (array.kind, array.axes, array.dtype)
        parts = [known for known in self._counted.values() if (known.kind, known.axes, known.dtype) == sought]
        # Each number of elements that some promises add up to, with one choice of executions that gives it.
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
        """Return (times, allowance) for each promise of this kind that an array may match, the best match first.

        `times` is the number of promised executions that one execution of the array stands for: one, or one per block
        if the compiler joined the executions of a loop. Many arrays of a model have the same number of elements. So
        promises of the same dtype come first, then of the same shape, then the smallest (larger ones may be needed for
        padded arrays), then single arrays before joined arrays.
        """
        shape = normal_shape(array.shapes[0])

        def order(fit: tuple[int, Allowance]) -> tuple[bool, bool, bool, int, int]:
            times, known = fit
            other_form = (times, shape) not in known.forms
            return not known.stack, known.dtype != array.dtype, other_form, times * known.elements[1], times

        alike = [known for known in self._counted.values() if (known.kind, known.axes) == (kind, array.axes)]
        return sorted(((times, known) for known in alike for times in known.fitting(array.elements)), key=order)

    def explain(self, array: Collective) -> str:
        """Explain why a collective has no match: its size is not promised, or it runs more often than promised."""
        kinds = (array.kind, *_STANDS_FOR.get(array.kind, ()))
        fitting = [known for kind in kinds for _, known in self._fitting(kind, array) if known.stack]
        if not fitting:
            return f"nothing of {array.elements:,} elements is promised there"
        names = [name for known in fitting for name in known.what]
        times = sum(known.most for known in fitting)
        return f"more often than promised: {times} times for {first_words(names)}"

    def missing(self) -> Iterator[str]:
        """Yield a line for each promised collective that happens less often than the promised minimum."""
        for known in self._counted.values():
            if known.used < known.least:
                yield (
                    f"{known.kind} over {'+'.join(known.axes)} of {known.elements[1]:,} elements, {known.used} times "
                    f"instead of {known.least}: {', '.join(known.what[:3])}"
                )

    def unread(self, found: Iterable[Collective], instead: Iterable[Collective]) -> Iterator[str]:
        """Yield a line for each promised (kind, axes) if the program has no such collective and no substitute for it.

        Either it does not happen, or the compiler wrote it in a form that the parser does not know.

        Args:
          found: all collectives of the program.
          instead: collectives that match no promise of a known size. They may replace promised collectives over the
            same axes: a product with shards of a weight, for example, sums activations and needs no gather.
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
                yield f"{over}, and the program has neither these nor a substitute"


def _has_fewer_bits(found: str, promised: str) -> bool:
    """Return True if a float dtype has fewer bits than the promised dtype: `("bf16", "f32") -> True`."""
    both = bool(promised) and found.startswith(("f", "bf"))
    return both and hlo.bits_of(found) < hlo.bits_of(promised)


def _covers(one: Expected, array: Collective) -> bool:
    """Return True if the promise `one`, which allows any number of executions, allows this collective."""
    if one.kind != array.kind or (one.axes and not set(array.axes) <= set(one.axes)):
        return False
    most = one.limit if one.shape is None else math.prod(one.shape)
    return most is None or array.elements <= most
