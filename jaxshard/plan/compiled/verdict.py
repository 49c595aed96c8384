"""`Verdict`: what a compiler said about a step, as a table, as JSON, and for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxshard.checks.collectives.compare import compare
from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.collectives.counts import grouped, total
from jaxshard.checks.collectives.found import Collective, arrays_only, collectives
from jaxshard.checks.collectives.instructions import rematerialized
from jaxshard.checks.collectives.operation import Operation
from jaxshard.checks.collectives.promise import promise
from jaxshard.core.layout import human_bytes
from jaxshard.core.settings import own_settings
from jaxshard.core.text_table import Section, Table, page
from jaxshard.core.types import PyTree
from jaxshard.cost.hardware import chip as chip_of
from jaxshard.plan.compiled.cycles import estimated_cycles
from jaxshard.plan.compiled.judge import Answer
from jaxshard.plan.compiled.live import LiveArray
from jaxshard.plan.compiled.memory import Memory
from jaxshard.plan.compiled.refusal import parse_refusal
from jaxshard.plan.compiled.savings import Saving, savings
from jaxshard.plan.roles import ROLES
from jaxshard.plan.topology import Target
from jaxshard.training.step import Step

NEAR = 0.05
"""The distance from the limit, as a share of it, within which an extrapolated size does not tell whether a step fits.

A compiler saved 4 % there by another schedule (docs/records/decisions.md)."""
_SHOWN = 12
"""Rows of a list that the table shows; `as_dict` has all of them."""


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

    `print(verdict)` is a table, `verdict.as_dict()` goes into JSON. All bytes are of one device. Memory is given by two
    figures: what is live at once, and what is allocated, with the gaps between arrays; the second must fit.

    Attributes:
      target: the topology.
      step: on devices of the topology.
      batch: its shapes.
      answer: what the compiler answered.
      memory: what it assigned, by arrays.
      compiled: the compiled step of `codegen=True`; None otherwise, and where the compiler refused.
      judged_by: "compiler", or "extrapolated" from two small depths.
    """

    target: Target
    step: Step = field(repr=False)
    batch: PyTree = field(repr=False)
    answer: Answer = field(repr=False)
    memory: Memory = field(repr=False)
    compiled: jax.stages.Compiled | None = field(default=None, repr=False)
    judged_by: str = "compiler"

    @property
    def topology(self) -> str:
        """The devices, such as "v5e:16x16", or "2 x v5e:16x16"."""
        return str(self.target)

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(self.step.layout.mesh.shape)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.step.layout.mesh.size

    @property
    def device_kind(self) -> str:
        """The name that JAX has for a device."""
        return str(self.step.layout.mesh.devices.flat[0].device_kind)

    @property
    def refusal(self) -> str:
        """The compiler's own words; "" where it took the program."""
        return self.answer.refusal

    @property
    def compile_seconds(self) -> float:
        """The seconds that the compiler took, when it was asked."""
        return self.answer.seconds

    @cached_property
    def usable_bytes(self) -> int | None:
        """The bytes that a program may use; None where that is not known."""
        if (refusal := parse_refusal(self.refusal)) is not None:
            return refusal.usable
        device = self.step.layout.mesh.devices.flat[0]
        chip = chip_of(device.device_kind, num_cores=getattr(device, "num_cores", None))
        return None if chip is None else chip.usable_bytes

    @property
    def fits(self) -> bool | None:
        """False if the compiler refused the step, or if it allocates more than a program may use.

        The second is for GPUs, whose compiler enforces nothing. None where the memory of the device is not known, and
        for an extrapolated size near the limit, where the compiler would schedule the step for less memory.
        """
        if self.refusal:
            return False
        if self.usable_bytes is None:
            return None
        if self.judged_by == "extrapolated" and abs(self.allocated_bytes / self.usable_bytes - 1) < NEAR:
            return None
        return self.allocated_bytes <= self.usable_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes that are live at once; see `Memory`."""
        return self.memory.live

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are reserved, gaps included; see `Memory`."""
        return self.memory.allocated

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments: the run and the batch."""
        return self.memory.arguments

    @property
    def arrays(self) -> tuple[LiveArray, ...]:
        """The arrays that are live when most are, arguments included, the largest first."""
        return self.memory.arrays

    @property
    def moment(self) -> str:
        """The moment at which most bytes are live, in words."""
        return self.memory.moment

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """Changes that would need less memory, with upper bounds, the largest first."""
        return savings(self.arrays, self.step.layout, self.step.engine, self.batch, self.live_bytes)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the program."""
        return collectives(self.answer.text, self.step.layout.mesh) if self.answer.text else ()

    @cached_property
    def comparison(self) -> Comparison | None:
        """The program's collectives compared with the layout's promise, as by `js.audit`; None without a program."""
        if not self.answer.text:
            return None
        layout, step = self.step.layout, self.step
        with own_settings(layout.mesh):
            promised = promise(layout, step.engine, step.loss_fn, self.batch)
        return compare(promised, self.collectives)

    @cached_property
    def rematerialized(self) -> tuple[Operation, ...]:
        """The instructions that the compiler computes again on its own, to save memory."""
        return rematerialized(self.answer.text) if self.answer.text else ()

    @cached_property
    def cycles(self) -> int | None:
        """The cycles that a TPU's compiler estimates, without collectives and Pallas kernels.

        None without `codegen=True`, and of GPUs.
        """
        return None if self.compiled is None else estimated_cycles(self.answer.text)

    @property
    def by_role(self) -> dict[str, int]:
        """Live bytes by role, in the order of `plan.roles.ROLES`."""
        sums = Counter[str]()
        for one in self.arrays:
            sums[one.role] += one.bytes
        return {role: sums[role] for role in ROLES}

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives of arrays by kind, axes and line of the model, the most bytes first."""
        groups = grouped(arrays_only(self.collectives), lambda one: (one.kind, one.axes, one.place, one.synchronous))
        rows = [Traffic(*key, total(x.count for x in of), total(x.bytes for x in of)) for key, of in groups.items()]
        return tuple(sorted(rows, key=lambda row: -(row.bytes or 0)))

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON has it: dictionaries, lists and numbers."""
        return {
            "topology": self.topology,
            "devices": self.devices,
            "device_kind": self.device_kind,
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "judged_by": self.judged_by,
            "hbm_bytes": self.usable_bytes,
            "live_bytes": self.live_bytes,
            "allocated_bytes": self.allocated_bytes,
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
        }

    def __str__(self) -> str:
        """Write memory by role, the largest arrays, what would save memory, collectives and differences."""
        return "\n\n".join(
            "\n".join([f"{one.title}:", *one.lines] if one.title else one.lines) for one in self._sections()
        )

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return page(*self._sections())

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

    def _headline(self) -> list[str]:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        limit = "" if self.usable_bytes is None else f" of {human_bytes(self.usable_bytes)} that a program may use"
        word = {True: "fits", False: "does not fit", None: "may fit" if self.usable_bytes else "compiles"}[self.fits]
        sizes = f"{human_bytes(self.allocated_bytes)} allocated{limit}, {human_bytes(self.live_bytes)} live at once"
        lines = [f"{self.topology}, {self.devices} x {self.device_kind} ({axes})", f"{word}: {sizes}, on each device"]
        if self.judged_by == "extrapolated":
            lines.append("extrapolated from the same step with 2 and 4 blocks")
        if self.cycles is not None:
            lines.append(f"estimated cycles of a step: {self.cycles:,}, without collectives and Pallas kernels")
        remembered = ", remembered" if self.answer.remembered else ""
        return [*lines, f"compiled in {self.compile_seconds:.0f} s{remembered}"]

    def _memory(self) -> Table:
        rows = [
            (role, human_bytes(size), f"{size / max(self.live_bytes, 1):.0%}")
            for role, size in self.by_role.items()
            if size
        ]
        return Table([*rows, ("live at once", human_bytes(self.live_bytes), "")], "<>>", ("", "bytes", "share"))


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
