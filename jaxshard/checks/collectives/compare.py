"""The comparison of a promise with a compiled program, which names every collective that nothing promised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxshard.checks.collectives.cause import cause
from jaxshard.checks.collectives.compiler_choices import explain_substitutes
from jaxshard.checks.collectives.describe import by_line, describe, is_users, listed
from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.forbidden import explain_forbidden, is_forbidden
from jaxshard.checks.collectives.found import KINDS, Collective, arrays_only, collectives, pick, summary
from jaxshard.checks.collectives.inserted import warn_of_inserted
from jaxshard.checks.collectives.instructions import in_host_memory, rematerialized
from jaxshard.checks.collectives.matching import Allowances, Taken
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.promise import Promise, promise
from jaxshard.checks.collectives.surprise import Surprise, entries, merged, wanted_axes
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.layout import human_bytes
from jaxshard.core.settings import own_settings
from jaxshard.core.text_table import Folded, Table, first_words, page
from jaxshard.core.types import PyTree
from jaxshard.training.step import Step

_NOTHING = "no collectives, and none promised"
_IN_F32 = re.compile(r"(\S+) in f32 in place of \1 in (?:bf16|f16) ")
_MISSING = "promised, but not found"
_SUBSTITUTES = "other kinds or dtypes than promised"
_UNREAD = "could not read"
_LINES = 12
"""The source lines whose collectives are printed."""


@dataclass(frozen=True)
class Comparison:
    """A promise and a program side by side.

    Attributes:
      promised: what was expected.
      found: every collective of the program.
      surprises: what nothing promised, in the order of the program.
      missing: what was promised to happen and did not, or more seldom; a compiler drops what nothing needs.
      tolerated: bytes that were not expected, but left to the compiler.
      substitutes: collectives that stand for promised ones of another kind or dtype: an all-reduce moves about twice
        the bytes of a reduce-scatter or an all-gather, a CPU sends bf16 as f32, a TPU gathers f32 weights in bf16
        where their products round them anyway. They are no surprises. A sum in a narrower dtype than promised is one.
      needed_bytes: bytes that promises without a number cover, as activations over tensor axes.
      program: what the program's text says beside its collectives; None where only those were given.
      unread: kinds of collectives whose promised bytes are not in the program, in no form: they do not happen, or the
        compiler wrote them in a way that is not known.
      widened_bytes: bytes that a CPU's compiler adds by sending bf16 as f32. TPUs and GPUs send bf16.
    """

    promised: tuple[Expected, ...]
    found: tuple[Collective, ...]
    surprises: tuple[Surprise, ...]
    missing: tuple[str, ...]
    tolerated: int = 0
    substitutes: tuple[str, ...] = ()
    needed_bytes: int = 0
    program: Program | None = None
    unread: tuple[str, ...] = ()
    widened_bytes: int = 0

    @property
    def ok(self) -> bool:
        """True if there is no surprise, and nothing that could not be read."""
        return not self.surprises and not self.unread

    @property
    def verdict(self) -> str:
        """The outcome in a few words; "as promised" only where nothing differs from the promise."""
        count = len(self.surprises)
        outcome = [f"{count} surprise{'s' * (count > 1)}"] if count else []
        outcome += [f"could not read {', '.join(one.partition(':')[0] for one in self.unread)}"] if self.unread else []
        if outcome:
            return "; ".join(outcome)
        exact = self.found_bytes == self.promised_bytes + self.needed_bytes
        differs = self.missing or self.tolerated or self.substitutes or not exact
        return "no surprises" if differs else "as promised"

    @property
    def promised_bytes(self) -> int:
        """Bytes of the arrays that are promised with a size, at most; each in one form, the one that is likely."""
        return sum(one.bytes or 0 for one in self.promised if one.is_counted)

    @property
    def found_bytes(self) -> int:
        """Bytes of the arrays that were found, without scalars and what runs an unknown number of times."""
        return sum(one.bytes or 0 for one in arrays_only(self.found))

    def rows(self) -> list[dict[str, Any]]:
        """Add up both sides: one row per kind and axes, scalars left out, in the order of `found.KINDS`.

        Returns:
          Dictionaries with "kind", "axis" (several joined by "+"), "promised" (bytes at most; None where the loss
          decides, as it does over tensor axes), "bytes" and "count" found. What only may be and is not has no row.
        """
        found = {(row.kind, row.axes): (row.count, row.bytes) for row in summary(arrays_only(self.found))}
        promised: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for one in self.promised:
            if one.bytes is not None and one.elements[1] > 1:
                promised[one.kind, one.axes] += one.bytes
        sure = {(one.kind, one.axes) for one in self.promised if one.least}
        rows = []
        for kind, axes in sorted(promised.keys() | found.keys(), key=lambda key: (KINDS.index(key[0]), key[1])):
            count, size = found.get((kind, axes), (0, 0))
            # A reduce-scatter that is not there was an all-reduce: its row says how much of those was promised.
            if count != 0 or (kind, axes) in sure or kind == "reduce-scatter":
                # Activations have no number of bytes. Where nothing else is promised the row says so, not that it is 0.
                any_size = [one for one in self.promised if one.shape is None and one.kind == kind]
                as_needed = any(set(axes) <= set(one.axes) for one in any_size)
                most = promised[kind, axes] or (None if as_needed else 0)
                row = {"kind": kind, "axis": "+".join(axes), "promised": most, "bytes": size, "count": count}
                rows.append(row)
        return rows

    def __str__(self) -> str:
        """Write the table and all entries of all lists."""
        return self._write(self._table_str(), *self._findings(all=True))

    def short(self) -> str:
        """Write the table, the surprises grouped by line and kind, and the number of entries of all other lists."""
        return self._write(self._table_str(), *self._findings(all=False))

    def _repr_html_(self) -> str:
        """Show the short form in a notebook, with the verdict above and the long form folded."""
        short, everything = (self._write(*self._findings(all=all)) for all in (False, True))
        return page(
            "no surprises" if self.ok else self.verdict,
            self._table() if self.rows() else _NOTHING,
            short,
            Folded("everything", [everything]) if everything else "",
        )

    def _write(self, *parts: str) -> str:
        return "\n\n".join(part for part in parts if part)

    def _findings(self, *, all: bool) -> Iterator[str]:
        """The paragraphs below the table."""
        missing, substitutes = self.missing, self.substitutes
        if not all:
            missing = (f"{len(missing)} kinds of arrays",) if len(missing) > 1 else missing
            # A note below says once that a CPU's compiler sends bf16 as f32.
            substitutes = tuple(one for one in substitutes if not (self.widened_bytes and _IN_F32.match(one)))
        yield listed(_UNREAD, self.unread)
        yield listed("surprises", entries(self.surprises, all=all))
        yield listed(_MISSING, missing)
        yield listed(_SUBSTITUTES, substitutes)
        yield "\n".join(self._notes())
        if all:
            yield listed("by source line", self._lines())
            yield str(self.program or "")
        elif self.program:
            yield "\n".join(self.program.titles())

    def _lines(self) -> Iterator[str]:
        """The collectives of the source lines that move most, and why the compiler put the largest of each there."""
        for of in by_line(arrays_only(self.found), lambda one: one)[:_LINES]:
            yield "\n    ".join(filter(None, (describe(*of), cause(of[0]) if of[0].trails else "")))

    def _notes(self) -> Iterator[str]:
        """Bytes that are left to the compiler, and bytes that move in some steps alone."""
        if self.widened_bytes:
            more = human_bytes(self.widened_bytes)
            yield f"a CPU's compiler sends bf16 as f32, {more} more than promised here; TPUs and GPUs send bf16"
        if self.tolerated:
            yield f"left to the compiler: {human_bytes(self.tolerated)}"
        sums: Counter[tuple[int, int, str, str]] = Counter()
        for one in self.promised:
            if one.every > 1 or one.until:
                sums[one.until, one.every, one.kind, "+".join(one.axes)] += one.bytes or 0
        for (until, every, kind, axes), size in sums.items():
            moved = f"{kind} over {axes}, {human_bytes(size)}"
            if until:
                yield f"of these in the first {until} steps alone: {moved}"
            else:
                yield f"of these once in {every} steps: {moved}, {human_bytes(size / every)} a step"

    def _table_str(self) -> str:
        table = self._table()
        return "\n".join(table.lines) if table.rows else _NOTHING

    def _table(self) -> Table:
        cells = []
        for row in self.rows():
            promised = "as needed" if row["promised"] is None else human_bytes(row["promised"])
            size = "?" if row["bytes"] is None else human_bytes(row["bytes"])
            count = "?" if row["count"] is None else f"{row['count']:,}"
            cells.append((row["kind"], row["axis"], promised, size, count))
        return Table(cells, "<<>>>", ("collective", "axis", "promised at most", "found", "times"))


def audit(step: Step, batch: PyTree) -> Comparison:
    """Compile a step and compare its collectives with the promise of its layout and engine.

    Nothing runs and no array is made; a mesh of a TPU topology (`js.plan.topology_mesh`) will do.

    Args:
      step: what `js.make_step` returned.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      The comparison; `print` it, or check `comparison.ok`.

    Example:
      comparison = js.audit(js.make_step(loss_fn, tx, layout), batch_shapes)
      assert comparison.ok, str(comparison)
    """
    batch = as_arrays("the batch", batch)
    with own_settings(step.layout.mesh):
        promised = promise(step.layout, step.engine, step.loss_fn, batch)
    compiled, mesh = step.compile(batch), step.layout.mesh
    found = collectives(compiled, mesh)
    warn_of_inserted(step.choices, compiled, mesh)
    # A CPU has no asynchronous collectives, so there is nothing to report of it.
    waited = () if mesh.devices.flat[0].platform == "cpu" else (one for one in found if one.synchronous)
    program = Program(tuple(waited), rematerialized(compiled), in_host_memory(compiled))
    return replace(compare(promised, found), program=program)


def compare(promised: Promise, found: Iterable[Collective]) -> Comparison:
    """Match every collective that is found with one that was promised, by kind, axes and number of elements.

    An all-reduce may stand for a reduce-scatter or an all-gather of the same array, and a wider dtype for a narrower
    one. A sum in a narrower dtype than promised is a surprise. So is what is left over,
    but for what the promise leaves to the compiler: up to `promised.slack` bytes, the smallest first. An array that
    must never travel is always one.

    Args:
      promised: what `promise` returned.
      found: what `collectives` returned, for the same mesh.

    Returns:
      Both side by side, with the surprises.

    Example:
        promised = js.plan.promise(layout, js.auto(), loss_fn, batch)
        print(js.plan.compare(promised, js.collectives(step.compile(batch), mesh)))
    """
    found = tuple(found)
    allowances = Allowances(promised.expected)
    problems: dict[tuple[int, int], str] = {}
    # Every array, by the number of its collective and its own there, as if it were moved alone.
    arrays = {(number, part): pick(one, [part]) for number, one in enumerate(found) for part in range(len(one.shapes))}
    left: list[tuple[tuple[int, int], Collective]] = []
    # What an engine issues is matched first: of equal arrays the user's own collective is to be the one left over. And
    # what happens often before what happens seldom: it needs a promise with room for all of its executions.
    for at, array in sorted(arrays.items(), key=lambda item: (is_users(item[1]), -(item[1].count or 0))):
        if banned := [one for one in promised.never if is_forbidden(one, array)]:
            problems[at] = explain_forbidden(banned, array)
        else:
            left.append((at, array))
    # Only after all own kinds are matched may an all-reduce use up what was promised of another kind, and only then an
    # array what was promised in a wider dtype. For a sum that is a surprise. A weight whose only use is a product that
    # rounds it to bf16, as a TPU's does by default, may just as well be rounded before it is gathered.
    taken: list[tuple[Collective, Taken]] = []
    for options in ({}, {"as_other": True}, {"narrower": True}, {"as_other": True, "narrower": True}):
        rest = []
        for at, array in left:
            covered = allowances.take(array, **options)
            if covered is None:
                rest.append((at, array))
            elif "narrower" in options and covered.kind != "all-gather":
                problems[at] = f"wire dtype {array.dtype}, promised {covered.dtype}: {first_words(covered.what)}"
            else:
                taken.append((array, covered))
        left = rest
    slack, small = promised.slack, []
    left = [(at, array) for at, array in left if allowances.take_joined(array) is None]
    for at, array in sorted(left, key=lambda item: (item[1].bytes is None, item[1].bytes or 0)):
        if array.bytes is not None and array.bytes <= slack:
            slack -= array.bytes
            small.append(array)
        else:
            problems[at] = allowances.explain(array)
    unasked = [arrays[at] for at in problems]
    instead = [one for of, one in allowances.as_needed if of.limit is None]
    return Comparison(
        promised.expected,
        found,
        surprises=merged(
            Surprise(arrays[at], why, _constraint(arrays[at], why, promised.names))
            for at, why in sorted(problems.items())
        ),
        missing=tuple(allowances.missing()),
        tolerated=promised.slack - slack,
        substitutes=_explain_substitutes(promised, taken),
        needed_bytes=sum(one.bytes or 0 for _, one in allowances.as_needed if one.elements > 1),
        unread=tuple(allowances.unread(found, [*instead, *small, *unasked])),
        widened_bytes=sum(map(_widened_by, taken)) if _is_cpu(promised) else 0,
    )


def _is_cpu(promised: Promise) -> bool:
    return promised.mesh is not None and promised.mesh.devices.flat[0].platform == "cpu"


def _widened_by(pair: tuple[Collective, Taken]) -> int:
    """The bytes that an array has because it is sent as f32 where 16 bits were promised."""
    one, covered = pair
    return (one.bytes or 0) // 2 if one.dtype == "f32" and covered.dtype in ("bf16", "f16") else 0


def _constraint(one: Collective, why: str, names: Mapping[str, str]) -> str:
    """The call that keeps the first array of a collective split as it is before it is moved."""
    split = "vocab" if why.startswith("logits") else "features"
    rows = [axis for axis, name in names.items() if name == "batch"]
    dims = [names.get(axes[0], split) if axes else None for axes in wanted_axes(one, rows)]
    return f"js.constrain(x, {tuple(split if name == 'features' else name for name in dims)})"


def _explain_substitutes(promised: Promise, taken: Iterable[tuple[Collective, Taken]]) -> tuple[str, ...]:
    """One line for every other kind or dtype than promised, and axes: how often, how much, and the remedy."""
    sums: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    names: dict[tuple[str, str, tuple[str, ...]], dict[str, None]] = {}
    for one, covered in taken:
        other_dtype = covered.dtype not in ("", one.dtype)
        if other_dtype or one.kind != covered.kind:
            pair = (f"{one.kind} in {one.dtype}", f"{covered.kind} in {covered.dtype}")
            key = (*(pair if other_dtype else (one.kind, covered.kind)), one.axes)
            names.setdefault(key, {}).update(dict.fromkeys(covered.what))
            total = sums.setdefault(key, [0, 0])
            total[0] += one.count or 0
            total[1] += one.bytes or 0
    lines = []
    for (found, instead, axes), (count, size) in sums.items():
        other_kind = found.split()[0] != instead.split()[0]
        remedy = explain_substitutes(promised.mesh, axes) if promised.mesh is not None and other_kind else ""
        of = first_words(list(names[found, instead, axes]))
        line = f"{found} in place of {instead} over {'+'.join(axes)}, {count:,} times, {human_bytes(size)}: {of}"
        lines.append(f"{line}\n    {remedy}" if remedy else line)
    return tuple(lines)
