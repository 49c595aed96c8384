"""The verdict of a compiler on a step, its memory and collectives, as a table, as JSON and in a notebook."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxshard.checks.collectives.compare import compare
from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.collectives.promise import promise
from jaxshard.checks.programs.live import live_arrays
from jaxshard.compiler.judge import Answer
from jaxshard.compiler.planned import mesh_chip
from jaxshard.compiler.refusal import parse_refusal
from jaxshard.compiler.topology import Target
from jaxshard.core.layout import human_bytes
from jaxshard.core.settings import own_settings
from jaxshard.core.text_table import Section, Table
from jaxshard.core.types import PyTree
from jaxshard.hlo.counts import grouped, total
from jaxshard.hlo.found import Collective, arrays_only, collectives
from jaxshard.hlo.instructions import rematerialized
from jaxshard.hlo.operation import Operation
from jaxshard.plan.compiled.cycles import estimated_cycles
from jaxshard.plan.compiled.known import known_shapes
from jaxshard.plan.compiled.savings import Saving, savings
from jaxshard.plan.memory_report import MemoryReport
from jaxshard.training.step import Step

_SHOWN = 12
"""The number of rows of a list that are printed; `as_dict` has all of them."""


@dataclass(frozen=True)
class Traffic:
    """The sum of all collectives of one kind, over the same mesh axes, that come from one line of the model.

    Attributes:
      kind: such as "all-gather".
      axes: the mesh axes.
      place: `file:line` in the model, or the compiler's name of the operation.
      synchronous: True if the device waits for them, False if it computes at the same time.
      count: executions per step; None in a loop of unknown trip count.
      bytes: bytes per step and device, counted before an array is scattered or after it is gathered; None in a loop of
        unknown trip count.
    """

    kind: str
    axes: tuple[str, ...]
    place: str
    synchronous: bool
    count: int | None
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Verdict(MemoryReport):
    """The verdict of a TPU's or GPU's compiler on a training step.

    `print(verdict)` is a table, `verdict.as_dict()` goes into JSON. All bytes are of one device. It has the
    attributes of `MemoryReport` and these:

    Attributes:
      topology: the devices, such as "v5e:16x16", or "2 x v5e:16x16".
      step: the step on devices of the topology.
      batch: the shapes of its batch.
      text: the optimized program; "" if the compiler refused before it wrote one.
      compiled: the compiled step of `codegen=True`; None otherwise, and if the compiler refused.
      compile_seconds: the seconds of the compilation; for a cached answer those of the original compilation.
    """

    topology: str
    step: Step = field(repr=False)
    batch: PyTree = field(repr=False)
    text: str = field(repr=False)
    compiled: jax.stages.Compiled | None = field(default=None, repr=False)
    compile_seconds: float = 0.0

    @property
    def device_kind(self) -> str:
        """JAX's name for the kind of device, such as "TPU v5 lite"."""
        return str(self.step.layout.mesh.devices.flat[0].device_kind)

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """Changes that save memory, with upper bounds of the saved bytes, the largest first."""
        return savings(self.arrays, self.step.layout, self.step.engine, self.batch, self.live_bytes)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in the compiled program, read from its HLO."""
        return collectives(self.text, self.step.layout.mesh) if self.text else ()

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison of the program's collectives with the promised ones (`js.audit`); None without a program."""
        layout, step = self.step.layout, self.step
        if not self.text:
            return None
        with own_settings(layout.mesh):
            return compare(promise(layout, step.engine, step.loss_fn, self.batch), self.collectives)

    @cached_property
    def rematerialized(self) -> tuple[Operation, ...]:
        """The instructions that the compiler computes again on its own, to save memory."""
        return rematerialized(self.text) if self.text else ()

    @cached_property
    def cycles(self) -> int | None:
        """The cycles of a step that a TPU's compiler estimates, without collectives and Pallas kernels.

        None if the step was compiled without `codegen=True`, and for GPUs.
        """
        return None if self.compiled is None else estimated_cycles(self.text)

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives added up by kind, axes and line of the model, the most bytes first; scalars are left out."""
        groups = grouped(arrays_only(self.collectives), lambda one: (one.kind, one.axes, one.place, one.synchronous))
        rows = [Traffic(*key, total(x.count for x in of), total(x.bytes for x in of)) for key, of in groups.items()]
        return tuple(sorted(rows, key=lambda row: -(row.bytes or 0)))

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as values that JSON can represent."""
        comparison = self.comparison
        return super().as_dict() | {
            "topology": self.topology,
            "device_kind": self.device_kind,
            "arrays": [asdict(one) for one in self.arrays],
            "savings": [one._asdict() for one in self.savings],
            "collectives": [asdict(row) for row in self.traffic],
            "surprises": [one.as_dict() for one in comparison.surprises] if comparison else [],
            "unread": list(comparison.unread) if comparison else [],
            "substitutes": list(comparison.substitutes) if comparison else [],
            "rematerialized": [one.as_dict() for one in self.rematerialized],
            "estimated_cycles": self.cycles,
            "compile_seconds": self.compile_seconds,
        }

    def sections(self) -> list[Section]:
        """Return the sections of the report: memory, changes that save memory, collectives, and broken promises."""
        savings = Table([(human_bytes(one.bytes), one.change) for one in self.savings], "><")
        found = super().sections() + [Section("what would save how much, at most", [savings])] * bool(self.savings)
        waited = sum(row.bytes or 0 for row in self.traffic if row.synchronous)
        title = f"collectives, of which a device waits for {human_bytes(waited)}"
        rows, head = [_traffic_row(one) for one in self.traffic[:_SHOWN]], ("kind", "axes", "times", "bytes", "", "at")
        found += [Section(title, [Table(rows, "<<>><<", head)])] * bool(rows)
        comparison = self.comparison
        lists = {
            "could not read": comparison.unread if comparison else (),
            "collectives that nothing promised": comparison.surprises if comparison else (),
            "other kinds or dtypes than promised": comparison.substitutes if comparison else (),
            "computed again by the compiler": self.rematerialized,
        }
        found += [Section(title, [str(one) for one in entries[:_SHOWN]]) for title, entries in lists.items() if entries]
        asked = f"{self.topology}: compiled in {self.compile_seconds:.0f} s"
        if self.cycles is not None:
            asked += f", {self.cycles:,} estimated cycles a step, without collectives and Pallas kernels"
        return [*found, Section("", [asked])]


def verdict_of(target: Target, step: Step, batch: PyTree, answer: Answer) -> Verdict:
    """Make the `Verdict` on a step from the compiler's answer (assigned memory, program text, refusal)."""
    chip, refusal, memory = mesh_chip(step.layout.mesh), parse_refusal(answer.refusal), answer.assignment
    asked = 0 if refusal is None else refusal.asked
    limit = None if chip is None else chip.usable_bytes
    arrays, moment = ((), "") if memory is None else live_arrays(memory, answer.text, known_shapes(step.layout))
    return Verdict(
        mesh=dict(step.layout.mesh.shape),
        chip=chip,
        judged_by="compiler",
        live_bytes=asked if memory is None else memory.peak,
        allocated_bytes=asked if memory is None else max(memory.allocated, asked),
        argument_bytes=0 if memory is None else sum(memory.arguments.values()),
        arrays=arrays,
        moment=moment,
        usable_bytes=limit if refusal is None else refusal.usable,
        refusal=answer.refusal,
        topology=str(target),
        step=step,
        batch=batch,
        text=answer.text,
        compile_seconds=answer.seconds,
    )


def _traffic_row(row: Traffic) -> tuple[str, ...]:
    count = "?" if row.count is None else f"{row.count:,}"
    size = "?" if row.bytes is None else human_bytes(row.bytes)
    return row.kind, "+".join(row.axes), count, size, "waits" if row.synchronous else "overlaps", row.place
