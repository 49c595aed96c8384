"""Read a trace of JAX's profiler: the operations that each device ran, and what the host did meanwhile.

A trace is an xplane file: planes (devices, the host), each with lines (threads, streams) of events. Three kinds of
devices write three kinds of planes:

    CPU  /host:CPU       any thread        "fusion.3", with hlo_op, hlo_module, program_id, run_id, device_ordinal
    GPU  /device:GPU:0   "Stream #..."     kernels, with hlo_op, hlo_module, program_id, correlation_id; hlo_op is a
                                           "command_buffer" for all kernels of a CUDA graph
    TPU  /device:TPU:0   "XLA Ops"         "%fusion.3 = f32[8]{0} fusion(...)"; the program by time in "XLA Modules"

A step begins on the host, at a `jax.profiler.StepTraceAnnotation`, and runs on the devices later. A launch on the host
has the same run_id or correlation_id as what it launches (in the host's plane, before JAX 0.11 in one of CUPTI); TPUs
write the steps of each device, as the line "Steps".
"""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxshard.core.compat import quiet_profile_types
from jaxshard.core.local_path import local_path
from jaxshard.profile.programs import Program, read_programs

_SUFFIX = ".xplane.pb"
_HOST, _CUPTI, _METADATA = "/host:CPU", "/host:CUPTI", "/host:metadata"
_DEVICE = re.compile(r"/device:((?:GPU|TPU):\d+)$")
_END = "end: "
"""The CPU marks the end of an operation by an event of its own."""
_PYTHON = "$"
"""Events of Python's functions begin with it; they have no further values."""
_HLO_NAME = re.compile(r"%?([\w.\-~]+)")


class Event(NamedTuple):
    """An operation that a device ran, or a function that the host ran.

    Attributes:
      start: in nanoseconds.
      end: in nanoseconds.
      name: its name in its program.
      text: the event's own name, such as that of a GPU's kernel.
      program: the name and the id of its program, such as "jit_step(6)"; "" if the trace does not say.
      launched: when the host launched it; where the trace does not say, its start.
    """

    start: float
    end: float
    name: str
    text: str = ""
    program: str = ""
    launched: float = 0.0


class Mark(NamedTuple):
    """The beginning of a step, in nanoseconds, and its number."""

    start: float
    step: int


class Trace(NamedTuple):
    """The trace of one process.

    Attributes:
      host: the name of the file without its suffix: that of the host.
      version: of JAX that wrote it; "" if it does not say.
      devices: the operations of each device, by its name, such as "CPU:0", in the order of their starts.
      marks: the beginnings of the steps on each device.
      host_events: what the thread did that annotated the steps.
      programs: the compiled programs, by name and id.
    """

    host: str
    version: str
    devices: dict[str, list[Event]]
    marks: dict[str, list[Mark]]
    host_events: list[Event]
    programs: dict[str, Program]


def newest_files(folder: str | Path) -> list[Path]:
    """Find the files of the newest trace in a folder, one for each host.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it has no trace, or only in another format.
    """
    root = local_path(folder)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder; give the one of --profile or js.fit(profile=...)")
    found = sorted(root.rglob(f"*{_SUFFIX}"))
    if not found:
        others = sorted(root.rglob("*.trace.json.gz"))
        if others:
            raise ValueError(f"{others[-1]}: the browser's copy of a trace; copy the {_SUFFIX} file next to it, too")
        raise ValueError(f"{root}: no trace (no *{_SUFFIX} file) is in it; write one with --profile {root}")
    newest = max((file.parent for file in found), key=lambda parent: (parent.name, parent))  # named by date and time
    return [file for file in found if file.parent == newest]


def read_trace(file: Path) -> Trace:
    """Read a file of the profiler.

    Raises:
      OSError: it can't be read.
      ValueError: it is no trace, or cut off; it has no step, or no operation of a device.
    """
    data = file.read_bytes()
    with quiet_profile_types():
        try:
            planes = {plane.name: plane for plane in ProfileData.from_serialized_xspace(data).planes}
        except RuntimeError as error:
            raise ValueError(f"{file}: cut off, or no trace of JAX's profiler; write or copy it again") from error
        return _trace_of(file, planes, read_programs(memoryview(data)))


def _trace_of(file: Path, planes: dict[str, Any], programs: dict[str, Program]) -> Trace:
    version = str(dict(planes[_METADATA].stats).get("jax_version", "")) if _METADATA in planes else ""
    marks, host_events, on_cpus = _read_host(planes.get(_HOST))
    if not marks:
        raise ValueError(
            f"{file}: no step is marked in this trace{_by(version)}; profile with --profile or js.fit(profile=...), or "
            "put jax.profiler.StepTraceAnnotation('train', step_num=step) around each step"
        )
    launches = _read_launches(planes)
    devices, own_marks = {}, {}
    for name, plane in planes.items():
        if found := _DEVICE.match(name):
            is_tpu = found[1].startswith("TPU")
            devices[found[1]], steps = _read_tpu(plane) if is_tpu else (_read_gpu(plane, launches), [])
            own_marks[found[1]] = steps or marks
    devices = {name: sorted(events) for name, events in (devices or on_cpus).items() if events}
    if not devices:
        raise ValueError(
            f"{file}: no operation of a device is in this trace{_by(version)}, only the host's; this version of "
            "jaxshard reads traces of JAX 0.10 to 0.12"
        )
    own_marks = {name: own_marks.get(name, marks) for name in devices}
    return Trace(file.name.removesuffix(_SUFFIX), version, devices, own_marks, host_events, programs)


def _by(version: str) -> str:
    return f" by JAX {version}" if version else ""


def _read_host(plane: Any) -> tuple[list[Mark], list[Event], dict[str, list[Event]]]:
    """Return the marks of steps, what their thread did, and the operations of CPU devices."""
    marks: list[Mark] = []
    host_events: list[Event] = []
    launches: dict[int, float] = {}
    found: list[tuple[Any, dict[str, Any]]] = []
    for line in () if plane is None else plane.lines:
        events, is_marked = [], False
        for event in line.events:
            events.append(event)
            stats = {} if event.name.startswith((_PYTHON, _END)) else dict(event.stats)
            if "step_num" in stats:
                marks.append(Mark(event.start_ns, int(stats["step_num"])))
                is_marked = True
            elif "hlo_op" in stats and "device_ordinal" in stats:
                found.append((event, stats))
            elif "run_id" in stats and "device_ordinal" not in stats:
                launches[stats["run_id"]] = min(event.start_ns, launches.get(stats["run_id"], event.start_ns))
        if is_marked:
            host_events += [Event(one.start_ns, one.end_ns, one.name.removeprefix(_PYTHON)) for one in events]
    devices: dict[str, list[Event]] = {}
    for event, stats in found:
        launched = launches.get(stats.get("run_id", 0), event.start_ns)
        devices.setdefault(f"CPU:{stats['device_ordinal']}", []).append(_operation(event, stats, launched))
    return sorted(marks), host_events, devices


def _read_launches(planes: dict[str, Any]) -> dict[int, float]:
    """Return when the host launched the kernels of GPUs, by their correlation ids."""
    if not any("GPU" in name for name in planes):
        return {}
    return {
        stats["correlation_id"]: event.start_ns
        for name in (_CUPTI, _HOST)
        for line in (planes[name].lines if name in planes else ())
        for event in line.events
        if not event.name.startswith(_PYTHON) and "correlation_id" in (stats := dict(event.stats))
    }


def _read_gpu(plane: Any, launches: dict[int, float]) -> list[Event]:
    return [
        _operation(event, stats, launches.get(stats.get("correlation_id", 0), event.start_ns))
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        for stats in [dict(event.stats)]
    ]


def _operation(event: Any, stats: dict[str, Any], launched: float) -> Event:
    program = f"{stats.get('hlo_module', '')}({stats.get('program_id', '')})"
    return Event(event.start_ns, event.end_ns, stats.get("hlo_op", event.name), event.name, program, launched)


def _read_tpu(plane: Any) -> tuple[list[Event], list[Mark]]:
    """Return the operations of a TPU and the marks of its steps."""
    lines = {line.name: list(line.events) for line in plane.lines}
    modules = sorted((one.start_ns, one.name) for one in lines.get("XLA Modules", ()))
    operations = []
    for one in lines.get("XLA Ops", ()):
        at = bisect_right(modules, one.start_ns, key=lambda module: module[0]) - 1
        name, program = _HLO_NAME.match(one.name), modules[at][1] if at >= 0 else ""
        operations.append(
            Event(one.start_ns, one.end_ns, name[1] if name else one.name, one.name, program, one.start_ns)
        )
    steps = [Mark(one.start_ns, int(one.name)) for one in lines.get("Steps", ()) if one.name.isdigit()]
    return operations, sorted(steps)
