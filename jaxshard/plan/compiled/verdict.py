"""`Verdict`: what a compiler said about a step, as a table, as JSON, and for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from jaxshard.checks.collectives import describe
from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.collectives.found import Collective, arrays_only
from jaxshard.checks.collectives.instructions import Instruction
from jaxshard.checks.collectives.walk import add_counts
from jaxshard.core.layout import human_bytes
from jaxshard.core.pictures import page
from jaxshard.core.pictures.style import ROLES as COLOURS
from jaxshard.core.text_table import Section, Table
from jaxshard.plan.compiled.live import LiveArray
from jaxshard.plan.compiled.savings import Saving
from jaxshard.plan.prediction import ROLES, Prediction

_SHOWN = 12
"""Rows of a list that the table shows; `as_dict` has all of them."""


class Difference(NamedTuple):
    """A number that was predicted beside the compiler's.

    Attributes:
      what: "peak", a role of memory, or "all-gather over data".
      predicted: bytes.
      compiled: bytes.
    """

    what: str
    predicted: int
    compiled: int

    def __str__(self) -> str:
        change = f"{self.predicted / self.compiled - 1:+.1%}" if self.compiled else ""
        return f"{self.what}: predicted {human_bytes(self.predicted)}, compiled {human_bytes(self.compiled)} {change}"


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes from one line of the model, added up.

    Attributes:
      kind: such as "all-gather".
      axes: the mesh axes.
      place: `file:line` in the model, or what the compiler calls it.
      synchronous: True if the device waits for them, False if it computes meanwhile.
      count: executions per step; None where a loop's number of turns is not known.
      bytes: of the whole arrays per step and device; None likewise.
    """

    kind: str
    axes: tuple[str, ...]
    place: str
    synchronous: bool
    count: int | None
    bytes: int | None


@dataclass(frozen=True)
class Verdict:
    """The verdict of a TPU's or GPU's compiler on a training step.

    `print(verdict)` is a table, `verdict.as_dict()` goes into JSON. All bytes are of one device.

    Attributes:
      topology: the devices, such as "v5e:16x16", or "2 x v5e:16x16".
      devices: how many.
      device_kind: what JAX calls one of them.
      mesh: the size of each axis.
      fits: False if the compiler refused the program, or, of GPUs, if the peak is more than there is: their compiler
        enforces nothing. None if the memory of the device is not known.
      usable_bytes: what a program may use; None where it is not known.
      peak_bytes: arguments and temporaries at the fullest moment; what a refused program asked for.
      argument_bytes: of what goes into the step.
      refusal: the compiler's own words; "" where it took the program.
      moment: when the fullest moment is.
      arrays: what is alive then, arguments included, the largest first.
      savings: what would make it less, upper bounds, the largest first.
      collectives: of the program.
      comparison: of them with the promise of the layout, as by `js.audit`; None where there is no program.
      rematerialized: what the compiler computes again on its own, to save memory.
      cycles: that a TPU's compiler estimates, without collectives and Pallas kernels; None where it refused, and of
        GPUs.
      compile_seconds: that the compiler took.
      prediction: `js.plan.predict` of the same step; None where it was not wanted.
    """

    topology: str
    devices: int
    device_kind: str
    mesh: Mapping[str, int]
    fits: bool | None
    usable_bytes: int | None
    peak_bytes: int
    argument_bytes: int
    refusal: str
    moment: str
    arrays: tuple[LiveArray, ...] = field(repr=False)
    savings: tuple[Saving, ...] = field(repr=False)
    collectives: tuple[Collective, ...] = field(repr=False)
    comparison: Comparison | None = field(repr=False)
    rematerialized: tuple[Instruction, ...] = field(repr=False)
    cycles: int | None
    compile_seconds: float
    prediction: Prediction | None = field(default=None, repr=False)

    @property
    def by_role(self) -> dict[str, int]:
        """Bytes at the fullest moment by role, in the order of `plan.prediction.ROLES`."""
        sums = Counter[str]()
        for one in self.arrays:
            sums[one.role] += one.bytes
        return {role: sums[role] for role in ROLES}

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives of arrays by kind, axes and line of the model, the most bytes first."""
        rows: dict[tuple[Any, ...], Traffic] = {}
        for one in arrays_only(self.collectives):
            key = (one.kind, one.axes, describe.place_of(one), one.synchronous)
            before = rows.get(key, Traffic(*key, 0, 0))
            count, size = add_counts(before.count, one.count), add_counts(before.bytes, one.bytes)
            rows[key] = replace(before, count=count, bytes=size)
        return tuple(sorted(rows.values(), key=lambda row: -(row.bytes or 0)))

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where prediction and compiler stand: the peak, each role, and each kind of collective over its axes."""
        if self.prediction is None:
            return ()
        roles = self.prediction.peak.by_role
        found = [Difference("peak", self.prediction.peak.total, self.peak_bytes)]
        found += [Difference(role, roles.get(role, 0), size) for role, size in self.by_role.items()]
        predicted, compiled = Counter[str](), Counter[str]()
        for one in self.prediction.collectives:
            predicted[f"{one.kind} over {'+'.join(one.axes)}"] += int(one.array_bytes)
        for row in self.traffic:
            compiled[f"{row.kind} over {'+'.join(row.axes)}"] += row.bytes or 0
        names = sorted(predicted.keys() | compiled.keys()) if predicted else ()
        found += [Difference(name, predicted[name], compiled[name]) for name in names]
        return tuple(one for one in found if one.predicted or one.compiled)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON has it: dictionaries, lists and numbers."""
        return {
            "topology": self.topology,
            "devices": self.devices,
            "device_kind": self.device_kind,
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "hbm_bytes": self.usable_bytes,
            "compiled_peak_bytes": self.peak_bytes,
            "argument_bytes": self.argument_bytes,
            "refusal": self.refusal or None,
            "moment": self.moment,
            "by_role": self.by_role,
            "arrays": [one.as_dict() for one in self.arrays],
            "savings": [one._asdict() for one in self.savings],
            "collectives": [asdict(row) | {"axes": list(row.axes)} for row in self.traffic],
            "surprises": [one.as_dict() for one in self.comparison.surprises] if self.comparison else [],
            "unread": list(self.comparison.unread) if self.comparison else [],
            "substitutes": list(self.comparison.substitutes) if self.comparison else [],
            "rematerialized": [one.as_dict() for one in self.rematerialized],
            "estimated_cycles": self.cycles,
            "compile_seconds": self.compile_seconds,
            "differences": [one._asdict() for one in self.differences],
        }

    def __str__(self) -> str:
        """Write memory by role, the largest arrays, what would save memory, collectives and differences."""
        return "\n\n".join(
            "\n".join([f"{one.title}:", *one.lines] if one.title else one.lines) for one in self._sections()
        )

    def _repr_html_(self) -> str:
        """Show the same in a notebook, memory by role as a bar too."""
        headline, *sections = self._sections()
        where, outcome, *more = headline.lines
        by_role = {role: (size, human_bytes(size)) for role, size in self.by_role.items()}
        limit = None if self.usable_bytes is None else (self.usable_bytes, f"usable: {human_bytes(self.usable_bytes)}")
        return page.page(
            page.paragraph(where),
            page.verdict(self.fits, outcome),
            *map(page.paragraph, more),
            page.bar(by_role, COLOURS, limit=limit),
            page.sections(sections, marks=COLOURS),
        )

    def _sections(self) -> Iterator[Section]:
        yield Section("", self._headline())
        yield Section("memory of a device", [self._memory()])
        if self.arrays:
            when = f" ({self.moment})" if self.moment else ""
            yield Section(f"largest at the fullest moment{when}", _cut(map(_array_row, self.arrays), "><><"))
        if self.savings:
            title = "what would save how much, at most" if self.fits is False else "what would save memory, at most"
            yield Section(title, _cut(((human_bytes(one.bytes), one.change) for one in self.savings), "><"))
        if self.traffic:
            waited = sum(row.bytes or 0 for row in self.traffic if row.synchronous)
            title = f"collectives, of which a device waits for {human_bytes(waited)}"
            title += ", of those that could be read" * bool(self.comparison and self.comparison.unread)
            head = ("kind", "axes", "times", "bytes", "", "at")
            yield Section(title, _cut(map(_traffic_row, self.traffic), "<<>><<", head))
        if self.comparison and self.comparison.unread:
            yield Section("could not read", list(self.comparison.unread))
        if self.comparison and self.comparison.surprises:
            yield Section("collectives that nothing promised", [str(one) for one in self.comparison.surprises[:_SHOWN]])
        if self.comparison and self.comparison.substitutes:
            yield Section("other kinds or dtypes than promised", list(self.comparison.substitutes))
        if self.rematerialized:
            lines = [str(one) for one in self.rematerialized[:_SHOWN]]
            yield Section(f"computed again by the compiler, {len(self.rematerialized)} instructions", lines)
        if self.differences:
            yield Section("prediction and compiler", [str(one) for one in self.differences])

    def _headline(self) -> list[str]:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        limit = "" if self.usable_bytes is None else f" of {human_bytes(self.usable_bytes)} that a program may use"
        lines = [f"{self.topology}, {self.devices} x {self.device_kind} ({axes})"]
        if self.refusal:
            lines.append(f"does not fit: the program asks for {human_bytes(self.peak_bytes)}{limit} on each device")
        else:
            word = {True: "fits", False: "does not fit", None: "compiles"}[self.fits]
            lines.append(f"{word}: {human_bytes(self.peak_bytes)}{limit} on each device")
        if self.cycles is not None:
            lines.append(f"estimated cycles of a step: {self.cycles:,}, without collectives and Pallas kernels")
        return [*lines, f"compiled in {self.compile_seconds:.0f} s"]

    def _memory(self) -> Table:
        predicted = None if self.prediction is None else self.prediction.peak
        rows: list[tuple[str, ...]] = []
        for role, size in self.by_role.items():
            guess = 0 if predicted is None else predicted.by_role.get(role, 0)
            if size or guess:
                share = f"{size / max(self.peak_bytes, 1):.0%}"
                rows.append((role, human_bytes(size), share, human_bytes(guess)))
        rows.append(("peak", human_bytes(self.peak_bytes), "", human_bytes(predicted.total if predicted else 0)))
        columns = 3 if predicted is None else 4
        head = ("", "bytes", "share", "predicted")
        return Table([row[:columns] for row in rows], "<>>>"[:columns], head[:columns])


def _array_row(one: LiveArray) -> tuple[str, ...]:
    times = f"{one.count} x " if one.count > 1 else ""
    place = f"{one.what} at {one.source}" if one.source else one.what
    return human_bytes(one.bytes), one.role, f"{times}{one.dtype}{list(one.shape)}", place


def _traffic_row(row: Traffic) -> tuple[str, ...]:
    count = "?" if row.count is None else f"{row.count:,}"
    size = "?" if row.bytes is None else human_bytes(row.bytes)
    return row.kind, "+".join(row.axes), count, size, "waits" if row.synchronous else "overlaps", row.place


def _cut(rows: Iterable[tuple[str, ...]], sides: str, head: tuple[str, ...] = ()) -> list[str | Table]:
    """A table of the first rows, and a line that counts the others."""
    rows = list(rows)
    left = len(rows) - _SHOWN
    shown = Table(rows[:_SHOWN], sides, head)
    return [shown, f"and {left} smaller ones"] if left > 0 else [shown]
