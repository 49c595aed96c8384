"""What a strategy promised against what a program communicates: every collective that nothing promised, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxshard.checks.collectives.found import KINDS, Collective, HasText, arrays_only, collectives, summary
from jaxshard.checks.collectives.promise import Expected, Never, Promise, form, promise
from jaxshard.checks.collectives.source import is_of_a_model
from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.our_code import is_jaxshard_file
from jaxshard.core.text_table import align_columns
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import Engine

_STANDS_FOR = {"all-reduce": ("reduce-scatter", "all-gather")}
"""A compiler may reduce everywhere and slice, or add up arrays that are zero elsewhere."""


@dataclass(frozen=True)
class Surprise:
    """A collective that nothing promised.

    `found` holds the unexpected ones of its arrays; `why` says what was promised instead, or what must never travel.
    """

    found: Collective
    why: str

    @property
    def place(self) -> str:
        """The line in the user's model, or the one that uses the result; else the operation's name in the program."""
        if _is_users(self.found):
            return self.found.source
        if self.found.user:
            return self.found.user
        name = self.found.op_name or self.found.op
        return name if self.found.source in (name, self.found.op) else f"{self.found.source} ({name})"

    def as_dict(self) -> dict[str, Any]:
        """The surprise for JSON."""
        one = self.found
        return {
            "kind": one.kind,
            "axis": "+".join(one.axes),
            "count": one.count,
            "bytes": one.bytes,
            "dtype": one.dtype,
            "shapes": [list(shape) for shape in one.shapes],
            "place": self.place,
            "op": one.op,
            "op_name": one.op_name,
            "why": self.why,
        }

    def __str__(self) -> str:
        one = self.found
        times = "? times" if one.count is None else "once" if one.count == 1 else f"{one.count:,} times"
        size = "? bytes" if one.bytes is None else human_bytes(one.bytes)
        shapes = ", ".join(f"{one.dtype}{list(shape)}" for shape in one.shapes)
        return f"{one.kind} over {'+'.join(one.axes)}, {times}, {size}: {shapes}\n    at {self.place}\n    {self.why}"


@dataclass(frozen=True)
class Comparison:
    """A promise and a program side by side.

    Attributes:
      promised: what was expected.
      found: every collective of the program.
      surprises: what nothing promised, in the order of the program. None of them: the promise was kept.
      missing: what was promised to happen and did not, or more seldom; a compiler drops what nothing needs.
      tolerated: bytes that were not expected, but left to the compiler.
    """

    promised: tuple[Expected, ...]
    found: tuple[Collective, ...]
    surprises: tuple[Surprise, ...]
    missing: tuple[str, ...]
    tolerated: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no surprise."""
        return not self.surprises

    def rows(self) -> list[dict[str, Any]]:
        """One row per kind and axes, scalars left out: bytes promised at most, bytes and executions found.

        "promised" is None where the loss decides, as it does over tensor axes. What only may be and is not has no row.
        """
        rows: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}

        def row(kind: str, axes: tuple[str, ...]) -> dict[str, Any]:
            empty = {"kind": kind, "axis": "+".join(axes), "promised": 0, "bytes": 0, "count": 0}
            return rows.setdefault((kind, axes), empty)

        for one in self.promised:
            if one.bytes is not None and one.elements[1] > 1:
                row(one.kind, one.axes)["promised"] += one.bytes
        for known in summary(arrays_only(self.found)):
            row(known.kind, known.axes).update(count=known.count, bytes=known.bytes)
        for key, cells in rows.items():
            if any(one.shape is None and one.kind == key[0] and set(key[1]) <= set(one.axes) for one in self.promised):
                cells["promised"] = cells["promised"] or None
        sure = {(one.kind, one.axes) for one in self.promised if one.least}
        # A reduce-scatter that is not there was an all-reduce: its row says how much of those was promised.
        rows = {k: cells for k, cells in rows.items() if cells["count"] != 0 or k in sure or k[0] == "reduce-scatter"}
        return [rows[key] for key in sorted(rows, key=lambda key: (KINDS.index(key[0]), key[1]))]

    def __str__(self) -> str:
        small = f"left to the compiler: {human_bytes(self.tolerated)}" if self.tolerated else ""
        missing = _listed("promised, but not found", self.missing)
        parts = (_table(self), _listed("surprises", self.surprises), missing, small)
        return "\n\n".join(part for part in parts if part)


class HasStep(Protocol):
    """What the audit needs of a `js.Step`."""

    layout: Layout
    engine: Engine
    loss_fn: LossFn

    def compile(self, batch: PyTree) -> HasText: ...


def audit(step: HasStep, batch: PyTree) -> Comparison:
    """The compiled step for a batch of arrays or ShapeDtypeStructs against the promise of its layout and engine.

    Compiles, and moves nothing: works for the mesh of a TPU topology too (`plan.topology.topology_mesh`).
    """
    promised = promise(step.layout, step.engine, step.loss_fn, batch)
    return compare(promised, collectives(step.compile(batch), step.layout.mesh))


def compare(promised: Promise, found: Iterable[Collective]) -> Comparison:
    """Every collective that is found matched with one that was promised, by kind, axes and number of elements.

    An all-reduce may stand for a reduce-scatter or an all-gather of the same array. What is left over is a surprise,
    but for what the promise leaves to the compiler: up to `promised.slack` bytes, the smallest first. An array that
    must never travel is always one.
    """
    found = tuple(found)
    rooms = _Rooms(promised.expected)
    problems: dict[tuple[int, int], str] = {}
    items = [_Item(number, i, one) for number, one in enumerate(found) for i in range(len(one.shapes))]
    left: list[_Item] = []
    # What an engine issues comes first: of equal arrays the user's own collective is to be the one left over. And what
    # happens often: it needs a promise with room for all of it.
    for item in sorted(items, key=lambda item: (_is_users(item.found), -(item.found.count or 0))):
        if banned := [one for one in promised.never if _forbidden(one, item)]:
            problems[item.number, item.part] = _why_never(banned, item.found)
        elif not rooms.take(item, item.found.kind):
            left.append(item)
    left = [item for item in left if not any(rooms.take(item, kind) for kind in _STANDS_FOR.get(item.found.kind, ()))]
    slack = promised.slack
    for item in sorted(left, key=lambda item: math.inf if item.bytes is None else item.bytes):
        if item.bytes is not None and item.bytes <= slack:
            slack -= item.bytes
        else:
            problems[item.number, item.part] = rooms.why(item)
    return Comparison(
        promised.expected, found, _surprises(found, problems), tuple(rooms.missing()), promised.slack - slack
    )


class _Item(NamedTuple):
    """One array of a collective, which may move several."""

    number: int
    part: int
    found: Collective

    @property
    def shape(self) -> tuple[int, ...]:
        return self.found.shapes[self.part]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int | None:
        return None if self.found.count is None else self.found.count * self.found.sizes[self.part]


class _Key(NamedTuple):
    """What makes two promised arrays the same to a program: elements, not shapes, which compilers change."""

    kind: str
    axes: tuple[str, ...]
    elements: tuple[int, int]
    stack: int


class _Rooms:
    """How often each promised array may still be moved."""

    def __init__(self, expected: Iterable[Expected]) -> None:
        self.any = [one for one in expected if one.shape is None or not one.axes]
        self.exact: dict[_Key, _Room] = {}
        for one in expected:
            if one.shape is not None and one.axes and one.most:
                room = self.exact.setdefault(_Key(one.kind, one.axes, one.elements, one.stack), _Room())
                room.least, room.most = room.least + one.least, room.most + one.most
                room.what.append(one.what)
                room.forms |= {(1, form(one.shape)), (one.stack, form((one.stack, *one.shape)))}

    def take(self, item: _Item, kind: str) -> bool:
        """Whether a collective of that kind was promised for the array, as often as it is found."""
        count = item.found.count
        for times, room in self._of(kind, item):
            if count is not None and room.used + times * count <= room.most:
                room.used += times * count
                return True
        return kind == item.found.kind and any(_covers(one, item) for one in self.any)

    def _of(self, kind: str, item: _Item) -> list[tuple[int, _Room]]:
        """The promises that an array may be, those of its form and size first, and how many executions each time is."""
        fits: list[tuple[bool, int, int, _Room]] = []
        for key, room in self.exact.items():
            if (key.kind, key.axes) == (kind, item.found.axes):
                least, most = key.elements
                fits += [
                    ((times, form(item.shape)) not in room.forms, times * most, times, room)
                    for times in dict.fromkeys((1, key.stack))
                    if times * least <= item.elements <= times * most
                ]
        return [(times, room) for *_, times, room in sorted(fits, key=lambda fit: fit[:2])]

    def why(self, item: _Item) -> str:
        """What was promised of an array of this size over these axes, if anything."""
        one = item.found
        known = [room for kind in (one.kind, *_STANDS_FOR.get(one.kind, ())) for _, room in self._of(kind, item)]
        if known:
            names = [name for room in known for name in room.what]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            times = sum(room.most for room in known)
            return f"more often than promised: {times} times for {', '.join(names[:3])}{more}"
        return f"nothing of {item.elements:,} elements is promised there"

    def missing(self) -> Iterator[str]:
        for (kind, axes, (_, size), _), room in self.exact.items():
            # An all-reduce in place of another kind is as good, and counts there.
            if room.used < room.least:
                yield (
                    f"{kind} over {'+'.join(axes)} of {size:,} elements, {room.used} times instead of {room.least}: "
                    f"{', '.join(room.what[:3])}"
                )


class _Room:
    def __init__(self) -> None:
        self.least = self.most = self.used = 0
        self.what: list[str] = []
        self.forms: set[tuple[int, tuple[int, ...]]] = set()


def _covers(one: Expected, item: _Item) -> bool:
    """Whether a promise without a number of executions covers the array."""
    if one.kind != item.found.kind or (one.axes and not set(item.found.axes) <= set(one.axes)):
        return False
    if one.shape is not None:
        return item.elements <= math.prod(one.shape)
    return one.limit is None or item.elements <= one.limit


def _forbidden(never: Never, item: _Item) -> bool:
    """Whether an array has the form of one that must not travel over these axes.

    A sum of a weight's size may be one of activations, so only what is gathered, exchanged or permuted is judged by a
    weight's form.
    """
    one = item.found
    if not set(one.axes) & set(never.axes):
        return False
    if never.vocab:
        return item.shape[-1:] == (never.vocab,) and item.elements > never.vocab and len(form(item.shape)) > 1
    if one.kind == "all-gather":
        return form(item.shape) in never.shapes
    moved = one.kind not in ("all-reduce", "reduce-scatter")
    return moved and item.elements in never.shards and one.dtype.startswith(("f", "bf"))


def _why_never(banned: list[Never], one: Collective) -> str:
    weights = [never.what for never in banned if not never.vocab] or [never.what for never in banned]
    what = " or ".join(weights[:3]) + (f" or one of {len(weights) - 3} more" if len(weights) > 3 else "")
    size = "" if one.kind == "all-gather" or banned[0].vocab else "by its size part of "
    return f"{size}{what}: must never move over {'+'.join(banned[0].axes)}"


def _surprises(found: tuple[Collective, ...], problems: dict[tuple[int, int], str]) -> tuple[Surprise, ...]:
    """One surprise per collective and reason, with the arrays that it is about; equal ones of one place added up."""
    merged: dict[tuple[Any, ...], Surprise] = {}
    for number, one in enumerate(found):
        mine = {part: why for (n, part), why in sorted(problems.items()) if n == number}
        for why in dict.fromkeys(mine.values()):
            parts = [part for part in mine if mine[part] == why]
            shapes = tuple(one.shapes[part] for part in parts)
            mine_only = replace(one, shapes=shapes, sizes=tuple(one.sizes[part] for part in parts))
            key = (one.kind, one.axes, one.dtype, shapes, one.source, one.op_name, one.count is None, why)
            before = merged[key].found.count if key in merged else 0
            count = None if one.count is None or before is None else one.count + before
            merged[key] = Surprise(replace(mine_only, count=count), why)
    return tuple(merged.values())


def _is_users(one: Collective) -> bool:
    """Whether the source is a line of a model: the user's own, or one of the ready-made ones."""
    file = Path(one.source.removeprefix("near ").rpartition(":")[0])
    if not one.frames:
        return False
    return not is_jaxshard_file(file) or is_of_a_model(file)


def _table(comparison: Comparison) -> str:
    cells = [("collective", "axis", "promised at most", "found", "times")]
    for row in comparison.rows():
        promised = "as needed" if row["promised"] is None else human_bytes(row["promised"])
        size = "?" if row["bytes"] is None else human_bytes(row["bytes"])
        count = "?" if row["count"] is None else f"{row['count']:,}"
        cells.append((row["kind"], row["axis"], promised, size, count))
    if len(cells) == 1:
        return "no collectives, and none promised"
    return "\n".join(align_columns(cells, "<<>>>"))


def _listed(title: str, entries: Iterable[object]) -> str:
    lines = [f"- {entry}" for entry in entries]
    return "\n".join([f"{title}:", *lines]) if lines else ""
