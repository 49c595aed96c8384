"""Compare two snapshots of a program, and describe each difference in a sentence, with its usual cause.

Collectives are matched by axis, kind, role and array, and arguments by role, array and sharding. The rest is matched
again by less: without the role, which may follow from names alone, then without the kind or the sharding. So an array
that is all-reduced where it was reduce-scattered is one change, not two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from jaxshard.checks.programs.moves import GRADIENT
from jaxshard.core.layout import human_bytes
from jaxshard.hlo.counts import grouped, number_str, total
from jaxshard.hlo.operation import times_str
from jaxshard.plan.guard.snapshot import Given, Moved, Snapshot

BYTES, PEAK, INSTRUCTIONS = 0.01, 0.02, 0.10
"""The relative changes that are tolerated: of bytes and FLOPs, of peak memory, and of the number of instructions."""
OTHER_COMPILER = 0.10
"""What is tolerated in totals of bytes and in peak memory if another compiler made the program."""
SMALL = 0.001
"""Changes below this share of all bytes moved, or of all arguments, are left out, unless they are of gradients."""

_Row = TypeVar("_Row", Moved, Given)
_VERBS = {
    "all-reduce": "all-reduced",
    "reduce-scatter": "reduce-scattered",
    "all-gather": "all-gathered",
    "collective-permute": "permuted",
    "collective-broadcast": "broadcast",
}
_PLURALS = {"batch": "arrays of the batch", "optimizer state": "moments of the optimizer", "other": "other arguments"}
_CAUSES = {
    "kind": "the result is stored replicated, or gradients or optimizer state lost a sharding constraint",
    "axis": "another axis splits the rows or the array: check the mesh axes in its sharding",
    "dtype": "a cast before the collective was added or lost",
    "more": "a loop over micro-batches or layers runs it in each iteration, or remat computes it again",
    "less": "",
    "better": "",
    "unknown": "the trip count of its loop, the cost of a kernel, or a sharding is not known any more",
    "fewer flops": "the model computes less: check that no layer, head or part of the loss is gone",
    "less gradient": "gradients of some rows may no longer be summed",
    "waits": "nothing is computed meanwhile: check the compiler's options, and what needs the result",
    "new weight": "a weight is gathered again: check remat, loops, and whether it is used in another place",
    "new gradient": "gradients are summed where they were not: check which axes split the batch and the parameters",
    "new": "an activation, or a weight that it is multiplied by, lacks its sharding constraint",
    "gone weight": "the weight is stored replicated, or no device uses it in full any more",
    "gone": "check that what it computes is still needed on every device",
    "gone gradient": "gradients of different rows are no longer summed: wrong, if this axis still splits the batch",
    "stored": "check the rules or specs that place it, and whether its shape divides",
    "peak": "see what is kept for the backward pass, the largest arrays in the file, the order of donated arguments",
    "flops": "the model computes more: a remat policy, a product that is computed twice, or a larger shape",
    "programs": "arguments differ between calls in shape, dtype, weak type or static value, and each compiles again",
    "again": "the compiler is short of memory and computes arrays twice: see what is kept for the backward pass",
    "instructions": "compile time follows: a loop over layers that is unrolled, or a scan that was lost",
}


class Change(NamedTuple):
    """A difference between the recorded and the present program.

    Attributes:
      text: what changed, in one sentence.
      cause: the usual cause, or what to look at; "" if the program is better than recorded.
      line: the source line, or the name of an argument; "" if there is none.
    """

    text: str
    cause: str
    line: str = ""

    def __str__(self) -> str:
        """Write the change with its line, and the cause in a second line."""
        return f"{self.text}{f': {self.line}' if self.line else ''}\n    {self.cause}"


def compare(old: Snapshot, new: Snapshot) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Compare the recorded snapshot of a program with the present one.

    Returns:
      (the changes that matter; notes on what is better than recorded and on what was not compared).
    """
    now, was = (", ".join(f"{axis}={size}" for axis, size in one.mesh.items() if size > 1) for one in (new, old))
    if now != was:
        return (Change(f"the mesh is {now}, where it was {was}", "nothing else was compared"),), ()
    if new.refusal:
        return (Change(f"the compiler refuses the program: {new.refusal}", "it needs too much memory"),), ()
    same, notes = old.compiler == new.compiler, []
    moved = _moved_changes(old, new) if same else _moved_totals(old, new)
    found = [*_given_changes(old, new), *moved, *_figures(old, new, same)]
    if not same:
        notes.append(
            f"recorded with {old.compiler}, compiled with {new.compiler}: of collectives only totals are compared, "
            f"within {OTHER_COMPILER:.0%}; waiting, recomputation and instructions are not"
        )
    notes += [f"better than recorded: {one.text}" for one in found if not one.cause]
    return tuple(one for one in found if one.cause), tuple(notes)


def _pair(
    before: Sequence[_Row], after: Sequence[_Row], *keys: Callable[[_Row], Any]
) -> tuple[list[tuple[_Row, _Row]], list[_Row], list[_Row]]:
    """Pair rows with equal keys one to one, by the first key, then the rest by the next; return also what is left."""
    pairs: list[tuple[_Row, _Row]] = []
    for key in keys:
        waiting: dict[Any, list[_Row]] = defaultdict(list)
        for row in reversed(after):
            waiting[key(row)].append(row)
        left = []
        for row in before:
            if waiting[key(row)]:
                pairs.append((row, waiting[key(row)].pop()))
            else:
                left.append(row)
        before, after = left, [row for rows in waiting.values() for row in reversed(rows)]
    return pairs, list(before), list(after)


# Collectives


def _moved_changes(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    renamed = _roles(old) != _roles(new)
    pairs, gone, added = _pair(
        _large(old.collectives, new.collectives),
        _large(new.collectives, old.collectives),
        lambda one: (one.axis, one.kind, one.moves, one.array, one.count),
        lambda one: (one.axis, one.kind, renamed or one.moves, one.array, one.count),
        lambda one: (one.axis, one.kind, one.moves, one.array),
        lambda one: (one.axis, one.moves, one.array),
        lambda one: (one.kind, one.moves, one.array),
        lambda one: (one.axis, one.kind, one.moves, one.array.partition("[")[2]),
    )
    changed = [(was, now, sort) for was, now in pairs if (sort := _sort_of(was, now))]
    for (_, _, _, sort), of in grouped(changed, lambda one: (*_title(one[0]), one[2])).items():
        was, now = [one[0] for one in of], [one[1] for one in of]
        endings = {
            "kind": f"where they were {_verb(was[0])}",
            "axis": f"where it was over {was[0].axis}",
            "dtype": f"where they were {was[0].array}",
            "waits": "and the device waits for more of it than before",
        }
        ending = endings.get(sort, f"instead of {times_str(_sum(was, 'count'))}")
        yield Change(f"{_sentence(now)}, {ending}", _cause(sort, was[0].moves), _line(now))
    for (_, _, moves), rows in grouped(added, _title).items():
        yield Change(f"{_sentence(rows)}, which they were not before", _cause("new", moves), _line(rows))
    for (_, _, moves), rows in grouped(gone, _title).items():
        yield Change(f"{_sentence(rows, 'are no longer')} before", _cause("gone", moves), _line(rows))


def _moved_totals(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    before, after = (grouped(of.collectives, _title) for of in (old, new))
    for title in dict.fromkeys((*after, *before)):
        was, now = (_sum(of.get(title, ()), "bytes") for of in (before, after))
        rows = after.get(title) or before[title]
        if was is None or now is None:
            if was is not now:
                yield Change(
                    f"{_sentence(rows)}, in a number that was or is not known", _CAUSES["unknown"], _line(rows)
                )
        elif abs(now - was) > OTHER_COMPILER * max(was, now):
            text = f"{_sentence(rows, size=now)} instead of {human_bytes(was)}"
            yield Change(text, _cause("more" if now > was else "less", title[2]), _line(rows))


def _large(rows: Sequence[Moved], others: Sequence[Moved]) -> list[Moved]:
    """Leave out the rows of small groups; gradients are never left out, since a lost sum makes the step wrong."""
    least = SMALL * max(sum(one.bytes or 0 for one in of) for of in (rows, others))
    groups = grouped((*rows, *others), _title)
    sizes = {title: _sum(of, "bytes") for title, of in groups.items()}
    return [one for one in rows if one.moves == GRADIENT or (sizes[_title(one)] or math.inf) > least]


def _sort_of(was: Moved, now: Moved) -> str:
    """Name the sort of a change, an entry of `_CAUSES`; "" if nothing that matters changed."""
    for sort, name in (("kind", "kind"), ("axis", "axis"), ("dtype", "array")):
        if getattr(was, name) != getattr(now, name):
            return sort
    if None in (was.count, now.count):
        return "unknown" if was.count != now.count else ""
    if was.count != now.count:
        return "more" if (now.count or 0) > (was.count or 0) else "less"
    return "waits" if (now.waited or 0) - (was.waited or 0) > BYTES * (now.bytes or 0) else ""


def _title(one: Moved) -> tuple[str, str, str]:
    return one.axis, one.kind, one.moves


def _cause(sort: str, moves: str) -> str:
    return _CAUSES.get(f"{sort} {moves}", _CAUSES[sort])


def _sentence(rows: Sequence[Moved], are: str = "are", size: int | None = None) -> str:
    """Write "gradients f32[64,64], f32[64] (12 times) are all-reduced over data, 154.7 MB"."""
    first, shown = rows[0], _few(row.array for row in rows)
    moved = human_bytes((_sum(rows, "bytes") or 0) if size is None else size)
    times = times_str(_sum(rows, "count"))
    return f"{_plural(first.moves)} {shown} ({times}) {are} {_verb(first)} over {first.axis}, {moved}"


def _few(names: Iterable[str]) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:3]) + f" and {len(different) - 3} more" * (len(different) > 3)


def _verb(row: Moved) -> str:
    return _VERBS.get(row.kind, "exchanged")


def _plural(role: str) -> str:
    return _PLURALS.get(role, f"{role.rstrip('s')}s")


def _sum(rows: Iterable[Moved], name: str) -> int | None:
    return total(getattr(row, name) for row in rows)


def _line(rows: Iterable[Moved]) -> str:
    return max(rows, key=lambda row: row.bytes or 0).line


# Arguments


def _given_changes(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    least = SMALL * max(1, *(sum(one.bytes for one in of.arguments) for of in (old, new)))
    renamed = _roles(old) != _roles(new)
    pairs, gone, added = _pair(
        _each(old.arguments),
        _each(new.arguments),
        lambda one: (one.role, one.array, one.split),
        lambda one: (renamed or one.role, one.array, one.split),
        lambda one: (renamed or one.role, one.array),
    )
    changed = [(was, now) for was, now in pairs if was.split not in (now.split, "?")]
    for (_, was_stored, stored), alike in grouped(changed, lambda pair: (pair[1].role, *map(_stored, pair))).items():
        before, after = [pair[0] for pair in alike], [pair[1] for pair in alike]
        text = f"{_arrays(after)}, {stored}, {_bytes(after)} on each device, where {was_stored}, {_bytes(before)}"
        if max(sum(one.bytes for one in rows) for rows in (before, after)) > least:
            yield Change(text, _CAUSES["stored"], after[0].name)
    for rows, word in ((added, "new"), (gone, "gone")):
        for of in grouped(rows, lambda one: one.role).values():
            if sum(one.bytes for one in of) > least:
                text = f"{_arrays(of)}, {_bytes(of)} on each device, {word}"
                yield Change(text, "the model, the optimizer or the batch changed", of[0].name)


def _arrays(rows: Sequence[Given]) -> str:
    return f"{len(rows)} of the {_plural(rows[0].role)}, {_few(row.array for row in rows)}"


def _bytes(rows: Iterable[Given]) -> str:
    return human_bytes(sum(row.bytes for row in rows))


def _roles(snapshot: Snapshot) -> set[str]:
    """Return the roles of the arguments: they follow from names, and roles of collectives follow from them."""
    return {one.role for one in snapshot.arguments}


def _each(rows: Iterable[Given]) -> list[Given]:
    """List every argument by itself, with the bytes of one."""
    return [replace(row, count=1, bytes=row.bytes // row.count) for row in rows for _ in range(row.count)]


def _stored(one: Given) -> str:
    if one.split == "?":
        return "stored in a way that is not known"
    split = [f"{axes} (dimension {dim})" for dim, axes in enumerate(one.split.split(",")) if axes not in ("-", "")]
    return f"stored split over {' and '.join(split)}" if split else "stored replicated"


# Figures


def _figures(old: Snapshot, new: Snapshot, same: bool) -> Iterator[Change]:
    """Yield a change for each figure that changed by more than is tolerated, without a cause if it is better."""
    figures: list[tuple[str, str, float, Callable[[int], str], str]] = [
        ("peak memory", "peak_bytes", PEAK if same else OTHER_COMPILER, human_bytes, "peak"),
        ("FLOPs of products", "flops", BYTES, number_str, "flops"),
        ("programs that JAX compiles", "programs", 0.0, number_str, "programs"),
    ]
    if same:
        figures += [
            ("computed again by the compiler", "rematerialized_bytes", BYTES, human_bytes, "again"),
            ("instructions of the compiled program", "instructions", INSTRUCTIONS, number_str, "instructions"),
        ]
    for what, name, tolerance, show, cause in figures:
        was, now = getattr(old, name), getattr(new, name)
        if was is not None and now is None:
            yield Change(f"{what}: not known any more, {show(was)} before", _CAUSES["unknown"])
        elif was is not None and now is not None and abs(now - was) > tolerance * max(was, now):
            sort = cause if now > was else "fewer flops" if name == "flops" else "better"
            yield Change(f"{what}: {show(now)} instead of {show(was)}", _CAUSES[sort])
