"""`read_profile`: where the time of a profiled step went, from the trace that JAX's profiler wrote."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxshard.core.our_code import short_path
from jaxshard.core.text_table import Section, Table
from jaxshard.hlo.found import KINDS
from jaxshard.profile.programs import Known, Program, kind_by_name
from jaxshard.profile.spans import Span, gaps, length, merge
from jaxshard.profile.trace import Event, Trace, newest_files, read_trace

_CONTAINERS = ("while", "conditional", "call")
"""Opcodes whose time is that of the operations in them, which are in the trace, too."""
_CUDA_GRAPH = "command_buffer"
"""What XLA names the operation of every kernel that a CUDA graph launches."""
_NS = 1e-9
_SHORT = 0.01
"""Gaps below this share of a step are added up, whatever the host did."""
_SHORT_NAME = f"(gaps below {_SHORT:.0%} of a step)"
_FILE = re.compile(r"\S+\.py(?=:\d)")
_NAME_WIDTH, _SOURCE_WIDTH = 40, 70
"""Characters of names and lines in tables; the names of kernels may be long."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step on one device, from the end of the step before to its own end.

    `compute`, `exposed` and `idle` add up to `seconds`.

    Attributes:
      step: its number.
      device: the device, such as "TPU:0"; with the name of the host if there are several hosts.
      seconds: the time of the step.
      compute: time in which the device ran an operation that is no collective.
      exposed: time in which it ran only collectives, or waited in them for other devices.
      idle: time in which it ran nothing.
    """

    step: int
    device: str
    seconds: float
    compute: float
    exposed: float
    idle: float


@dataclass(frozen=True)
class OperationTime:
    """The time of an operation of a program: the mean over profiled steps and devices.

    Attributes:
      name: the name in the program, such as "fusion.12".
      kind: the opcode, such as "fusion" or "all-gather"; "" if the trace does not say.
      source: the line of the user's code that needs it; else its name.
      count: executions per step.
      seconds: time per step.
      exposed: of a collective, the part of `seconds` in which the device computed nothing; else 0.
    """

    name: str
    kind: str
    source: str
    count: float
    seconds: float
    exposed: float

    @property
    def is_collective(self) -> bool:
        """True if devices communicate in it."""
        return self.kind in KINDS


@dataclass(frozen=True)
class Gap:
    """Idle time of devices, by what the host did meanwhile: the mean over profiled steps and devices.

    Attributes:
      host: the innermost event of the thread that trains, such as a Python function, that lasted for at least half of
        the gap.
      count: gaps per step.
      seconds: time per step.
    """

    host: str
    count: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Where the time of profiled steps went; it prints as tables.

    Attributes:
      file: the trace; of several hosts, the folder of their traces.
      version: the version of JAX that wrote it; "" if the trace does not say.
      steps: the time of each step on each device.
      operations: the operations by time, the longest first.
      gaps: idle time by what the host did, the longest first.
    """

    file: str
    version: str
    steps: tuple[StepTime, ...]
    operations: tuple[OperationTime, ...]
    gaps: tuple[Gap, ...]

    @property
    def exposed(self) -> tuple[OperationTime, ...]:
        """The collectives that devices waited for, the most exposed first."""
        found = (one for one in self.operations if one.exposed > 0)
        return tuple(sorted(found, key=lambda one: one.exposed, reverse=True))

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as values that JSON can represent."""
        return dataclasses.asdict(self) | {"exposed": [dataclasses.asdict(one) for one in self.exposed]}

    def sections(self, top: int = 10) -> list[Section]:
        """Return the tables: steps, exposed collectives, gaps and operations, of the last three `top` rows each."""
        numbers = sorted({one.step for one in self.steps})
        step_rows = [_step_row(number, [one for one in self.steps if one.step == number]) for number in numbers]
        head = ("step", "ms", "compute", "exposed", "idle", "slowest device")
        exposed = [(_ms(one.exposed), _ms(one.seconds), *_words(one)) for one in self.exposed]
        idle = [(_ms(one.seconds), _count(one.count), one.host[: _NAME_WIDTH + _SOURCE_WIDTH]) for one in self.gaps]
        operations = [(_ms(one.seconds), *_words(one)) for one in self.operations]
        words = ("count", "kind", "operation", "line")
        return [
            Section("milliseconds per step, mean over devices", [Table(step_rows, ">>>>><", head)]),
            _section("exposed collectives", exposed, ">>><<<", ("exposed ms", "of ms", *words), top),
            _section("gaps", idle, ">><", ("ms", "count", "the host meanwhile"), top),
            _section("operations", operations, ">><<<", ("ms", *words), top),
        ]

    def __str__(self) -> str:
        return "\n\n".join("\n".join([one.title, *one.lines]) for one in self.sections())


def read_profile(folder: str | Path) -> Profile:
    """Read the newest trace in a folder that `js.fit(..., profile=folder)` or `jax.profiler` wrote.

    A step is whatever the program marked with a `jax.profiler.StepTraceAnnotation`, as `js.fit` does. What the host
    launched after a step, such as an evaluation, counts for that step.

    Args:
      folder: the folder, or a file `*.xplane.pb` in it; traces of CPU devices, GPUs and TPUs.

    Returns:
      The time of each step on each device, exposed collectives, gaps and operations.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: the folder has no trace; the trace is damaged, has no step, or no operation of a device.

    Example:
        run = js.fit(run, step, batches, steps=1000, profile="trace")
        profile = js.read_profile("trace")
        print(profile)
        print(sum(one.exposed for one in profile.steps) / sum(one.seconds for one in profile.steps))
    """
    files = newest_files(folder)
    traces = [read_trace(file) for file in files]
    summary = _Summary()
    for trace in traces:
        for device in sorted(trace.devices, key=lambda name: (name.split(":")[0], int(name.split(":")[1]))):
            summary.add(trace, device, device if len(traces) == 1 else f"{trace.host} {device}")
    if not summary.steps:
        raise ValueError(f"{files[0]}: no operation was launched in a marked step; profile more steps")
    return summary.profile(str(files[0] if len(files) == 1 else files[0].parent), traces[0].version)


class _Measured(NamedTuple):
    """An operation of a device with what is known of it."""

    event: Event
    known: Known


class _Summary:
    """Adds up the steps of devices."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self._operations: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._gaps: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def add(self, trace: Trace, device: str, shown: str) -> None:
        """Add the steps of one device."""
        host = _Host(trace.host_events)
        start = trace.marks[device][0].start
        for step, operations in _split(trace, device):
            end = max(start, *(one.event.end for one in operations))
            if step is not None:
                self._add_step(step, shown, (start, end), operations, host)
            start = end

    def _add_step(self, step: int, device: str, window: Span, operations: Sequence[_Measured], host: _Host) -> None:
        is_collective = [one.known.kind in KINDS for one in operations]
        spans = [one.event[:2] for one in operations]
        compute = merge(span for span, collective in zip(spans, is_collective, strict=True) if not collective)
        idle = gaps(merge(spans), window)
        seconds, computing, waiting = (_NS * length(of) for of in ([window], _within(compute, window), idle))
        self.steps.append(StepTime(step, device, seconds, computing, max(0.0, seconds - computing - waiting), waiting))
        for one, span, collective in zip(operations, spans, is_collective, strict=True):
            entry = self._operations[one.event.program, one.event.name, *one.known]
            exposed = length(gaps(compute, span)) if collective else 0.0
            entry[:] = entry[0] + 1, entry[1] + length([span]), entry[2] + exposed
        for gap in idle:
            is_short = length([gap]) < _SHORT * length([window])
            entry = self._gaps[_SHORT_NAME if is_short else host.during(gap)]
            entry[:] = entry[0] + 1, entry[1] + length([gap])

    def profile(self, file: str, version: str) -> Profile:
        """Return the means over the steps of all devices."""
        per = len(self.steps)
        operations = [
            OperationTime(name, kind, source, count / per, _NS * time / per, _NS * exposed / per)
            for (_, name, kind, source), (count, time, exposed) in self._operations.items()
        ]
        idle = [Gap(host, count / per, _NS * time / per) for host, (count, time) in self._gaps.items()]
        longest_first = sorted(operations, key=lambda one: one.seconds, reverse=True)
        return Profile(
            file, version, tuple(self.steps), tuple(longest_first), tuple(sorted(idle, key=lambda one: -one.seconds))
        )


def _split(trace: Trace, device: str) -> Iterator[tuple[int | None, list[_Measured]]]:
    """Yield (step, its operations) of a device; first, with None, what was launched before the first step."""
    marks = trace.marks[device]
    parts: dict[int, list[_Measured]] = defaultdict(list)
    for event in trace.devices[device]:
        one = _identify(event, trace.programs.get(event.program))
        if one.known.kind not in _CONTAINERS:
            at = bisect_right(marks, event.launched, key=lambda mark: mark.start)
            parts[at].append(one)
    for at, operations in sorted(parts.items()):
        yield (marks[at - 1].step if at else None), operations


def _identify(event: Event, program: Program | None) -> _Measured:
    """Look up an operation in its program, by its name or else by that of its kernel."""
    known = program and program.find(event.name)
    if known is None and event.name.startswith(_CUDA_GRAPH):
        name = (program and program.name_of_kernel(event.text)) or event.text
        event, known = event._replace(name=name), program and program.find(name)
    return _Measured(event, known or Known(kind_by_name(event.text), event.text))


def _within(merged: Sequence[Span], window: Span) -> list[Span]:
    """Cut merged spans off at the ends of a window."""
    cut = [(max(start, window[0]), min(end, window[1])) for start, end in merged]
    return [(start, end) for start, end in cut if start < end]


class _Host:
    """What the host did at a time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._names = [one.name for one in events]
        self._starts, self._ends = (np.array(of) for of in zip(*(one[:2] for one in events), strict=True))

    def during(self, span: Span) -> str:
        """Return the name of the shortest event that lasted for at least half of a span."""
        overlap = np.minimum(self._ends, span[1]) - np.maximum(self._starts, span[0])
        (lasting,) = np.nonzero(overlap >= length([span]) / 2)
        if not lasting.size:
            return "(nothing that the profiler saw)"
        shortest = lasting[np.argmin((self._ends - self._starts)[lasting])]
        return self._names[int(shortest)]


def _step_row(number: int, of: Sequence[StepTime]) -> tuple[str, ...]:
    means = (sum(getattr(one, part) for one in of) / len(of) for part in ("seconds", "compute", "exposed", "idle"))
    slowest = max(of, key=lambda one: one.compute)
    return (str(number), *map(_ms, means), f"{slowest.device}, {_ms(slowest.compute)} of compute")


def _section(title: str, rows: Sequence[Sequence[str]], sides: str, head: Sequence[str], top: int) -> Section:
    if not rows:
        return Section(title, ["none"])
    more = [f"and {len(rows) - top} more"] if len(rows) > top else []
    return Section(f"{title}, per step and device", [Table(rows[:top], sides, head), *more])


def _words(one: OperationTime) -> tuple[str, ...]:
    return _count(one.count), one.kind, one.name[:_NAME_WIDTH], _shorten(one.source)


def _shorten(source: str) -> str:
    """Shorten the path of a file, and cut off the beginning of what is still too long."""
    short = _FILE.sub(lambda found: short_path(found[0]), source)
    return short if len(short) <= _SOURCE_WIDTH else f"...{short[-_SOURCE_WIDTH:]}"


def _count(mean: float) -> str:
    return f"{mean:.0f}" if mean >= 100 else f"{mean:.3g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
