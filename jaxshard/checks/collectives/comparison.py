"""The result of an audit: promised and found collectives and their differences, as text, JSON and HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxshard.checks.collectives.cause import cause
from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.surprise import Surprise, entries
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import Folded, Table, page
from jaxshard.hlo.counts import bytes_str, grouped, number_str
from jaxshard.hlo.found import KINDS, Collective, Row, arrays_only, summary
from jaxshard.hlo.operation import by_line, describe

_NOTHING = "no collectives, and none promised"
_IN_F32 = re.compile(r"(\S+) in f32 in place of \1 in (?:bf16|f16) ")
_LINES = 12
"""The source lines whose collectives are printed."""


@dataclass(frozen=True)
class Comparison:
    """The result of `js.audit`: the promised collectives, the collectives of the program, and the differences.

    A collective is promised if it follows from the layout, the engine and the loss.

    Attributes:
      promised: the promised collectives.
      found: every collective of the program.
      surprises: collectives that nothing promised, in the order of the program.
      missing: a line for each collective that happens less often than promised, for example because the compiler found
        that it is not needed.
      tolerated: bytes of unpromised arrays so small that they are not reported as surprises.
      substitutes: a line for each collective of another kind or dtype than promised. For example an all-reduce may
        replace a reduce-scatter (and moves about twice the bytes), a CPU sends bf16 as f32, and a TPU gathers f32
        weights in bf16 if their products round them anyway. These are no surprises, but sums in fewer bits are.
      needed_bytes: bytes of collectives whose size the promise leaves open ("as needed"), such as activations over
        tensor axes.
      program: waits, recomputation and host arrays of the program; None if only its collectives were given.
      unread: a line for each kind of collective that is promised with a size but was not found in the program. Either
        it does not happen, or the parser does not know the form in which the compiler wrote it.
      widened_bytes: bytes that a CPU's compiler adds by sending bf16 as f32. TPUs and GPUs send bf16.
      misplaced: arguments that are not stored as the strategy says; () except from `js.plan.audit_program`.
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
    misplaced: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if `surprises`, `misplaced` and `unread` are empty."""
        return not self.surprises and not self.misplaced and not self.unread

    @property
    def verdict(self) -> str:
        """The outcome in a few words: "2 surprises", "no surprises", or "as promised" if nothing differs at all."""
        count = len(self.surprises) + len(self.misplaced)
        outcome = [f"{count} surprise{'s' * (count > 1)}"] if count else []
        outcome += [f"could not read {', '.join(one.partition(':')[0] for one in self.unread)}"] if self.unread else []
        if outcome:
            return "; ".join(outcome)
        exact = self.found_bytes == self.promised_bytes + self.needed_bytes
        differs = self.missing or self.tolerated or self.substitutes or not exact
        return "no surprises" if differs else "as promised"

    @property
    def promised_bytes(self) -> int:
        """The most bytes that the collectives of known size may move according to the promise, per step and device."""
        return sum(one.bytes or 0 for one in self.promised if one.is_counted)

    @property
    def found_bytes(self) -> int:
        """Bytes that arrays of the program move, per step and device; loops of unknown trip count are left out."""
        return sum(one.bytes or 0 for one in arrays_only(self.found))

    def rows(self) -> list[dict[str, Any]]:
        """Make the table of the report: a row for each kind of collective and mesh axes, scalars left out.

        Returns:
          Dictionaries, in the order of `found.KINDS`, with these keys: "kind"; "axis" (several joined by "+");
          "promised", the most bytes that are promised (None if the promise leaves the size open, as for activations
          over tensor axes); "bytes" and "count", the bytes and executions in the program. A collective that may happen
          but does not has no row.
        """
        found = {(row.kind, row.axes): row for row in summary(arrays_only(self.found))}
        sized = [one for one in self.promised if one.bytes is not None and one.elements[1] > 1]
        promised = grouped(sized, lambda one: (one.kind, one.axes))
        sure = {(one.kind, one.axes) for one in self.promised if one.least}
        rows = []
        for kind, axes in sorted(promised.keys() | found.keys(), key=lambda key: (KINDS.index(key[0]), key[1])):
            row = found.get((kind, axes), Row(kind, axes, 0, 0))
            # A missing reduce-scatter became an all-reduce: its row shows how many bytes were promised.
            if row.count != 0 or (kind, axes) in sure or kind == "reduce-scatter":
                # Activations are promised without a size: if nothing else is, the row says "as needed", not 0.
                any_size = [one for one in self.promised if one.shape is None and one.kind == kind]
                as_needed = any(set(axes) <= set(one.axes) for one in any_size)
                most = sum(one.bytes or 0 for one in promised.get((kind, axes), ()))
                rows.append(row.as_dict() | {"promised": most or (None if as_needed else 0)})
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the rows of the table and all differences as one dictionary of values that JSON can represent."""
        lists = {name: list(getattr(self, name)) for name in ("misplaced", "missing", "unread", "substitutes")}
        surprises = [surprise.as_dict() for surprise in self.surprises]
        found = {"ok": self.ok, "surprises": surprises, **lists, "tolerated_bytes": self.tolerated}
        sizes = ("promised_bytes", "found_bytes", "needed_bytes", "widened_bytes")
        found |= {"collectives": self.rows()} | {name: getattr(self, name) for name in sizes}
        return found | (self.program.as_dict() if self.program else {})

    def __str__(self) -> str:
        """Write the report in full: the table, every difference, and the collectives by source line."""
        return _paragraphs(self._table_str(), *self.findings(all=True))

    def short(self) -> str:
        """Write the report in short: the table, the largest groups of surprises, and a few lines on the rest."""
        return _paragraphs(self._table_str(), *self.findings(all=False))

    def _repr_html_(self) -> str:
        """Show the short report in a notebook, with the full report in a section that opens on a click."""
        short, everything = (_paragraphs(*self.findings(all=all)) for all in (False, True))
        return page(
            "no surprises" if self.ok else self.verdict,
            self._table() if self.rows() else _NOTHING,
            short,
            Folded("everything", [everything]) if everything else "",
        )

    def differences(self, *, all: bool) -> Iterator[str]:
        """Yield the paragraphs on differences between program and promise, such as surprises or missing collectives.

        A kind of difference that does not occur gives "". With `all` every entry is listed, else long lists are
        shortened.
        """
        missing, substitutes = self.missing, self.substitutes
        if not all:
            missing = (f"{len(missing)} kinds of arrays",) if len(missing) > 1 else missing
            # A note below says once that a CPU's compiler sends bf16 as f32.
            substitutes = tuple(one for one in substitutes if not (self.widened_bytes and _IN_F32.match(one)))
        yield listed("could not read", self.unread)
        yield listed("surprises", entries(self.surprises, all=all))
        yield listed("not stored as the strategy says", self.misplaced)
        yield listed("promised, but not found", missing)
        yield listed("other kinds or dtypes than promised", substitutes)
        yield "\n".join(self._notes())

    def findings(self, *, all: bool) -> Iterator[str]:
        """Yield the paragraphs of the report after its table; with `all` in full, otherwise shortened."""
        yield from self.differences(all=all)
        if all:
            yield listed("by source line", self._lines())
            yield str(self.program or "")
        elif self.program:
            yield "\n".join(self.program.titles())

    def _lines(self) -> Iterator[str]:
        """Describe, for each of the source lines that move the most bytes, its collectives and why they are needed."""
        for of in by_line(arrays_only(self.found), lambda one: one)[:_LINES]:
            yield "\n    ".join(filter(None, (describe(of), cause(of[0]))))

    def _notes(self) -> Iterator[str]:
        """Yield notes on bytes that f32 adds on a CPU, small unpromised arrays, and collectives of only some steps."""
        if self.widened_bytes:
            more = human_bytes(self.widened_bytes)
            yield f"a CPU's compiler sends bf16 as f32, {more} more than promised here; TPUs and GPUs send bf16"
        if self.tolerated:
            yield f"left to the compiler: {human_bytes(self.tolerated)}"
        seldom = [one for one in self.promised if one.every > 1 or one.until]
        for (until, every, kind, axes), of in grouped(
            seldom, lambda one: (one.until, one.every, one.kind, one.axes)
        ).items():
            size = sum(one.bytes or 0 for one in of)
            moved = f"{kind} over {'+'.join(axes)}, {human_bytes(size)}"
            if until:
                yield f"of these in the first {until} steps alone: {moved}"
            else:
                yield f"of these once in {every} steps: {moved}, {human_bytes(size / every)} a step"

    def _table_str(self) -> str:
        table = self._table()
        return "\n".join(table.lines) if table.rows else _NOTHING

    def _table(self) -> Table:
        cells = [
            (row["kind"], row["axis"], bytes_str(row["promised"], "as needed"), bytes_str(row["bytes"]),
             number_str(row["count"]))
            for row in self.rows()
        ]  # fmt: skip
        return Table(cells, "<<>>>", ("collective", "axis", "promised at most", "found", "times"))


def listed(title: str, entries: Iterable[object]) -> str:
    """Write a title line and then one entry per line; return "" if there are no entries."""
    lines = [f"- {entry}" for entry in entries]
    return "\n".join([f"{title}:", *lines]) if lines else ""


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))
