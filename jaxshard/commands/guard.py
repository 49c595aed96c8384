"""`jaxshard guard`: record what a step communicates, needs and costs in a file, and check it later."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxshard.checks.programs.axes import position_mesh
from jaxshard.checks.programs.text import parse_program
from jaxshard.commands.compiler import load_compiler
from jaxshard.commands.devices import choose_devices
from jaxshard.commands.errors import UsageError, refusals, usage_errors
from jaxshard.commands.flags import Guard
from jaxshard.commands.json_object import write_json
from jaxshard.commands.parallel import read_axes
from jaxshard.commands.program import find_function
from jaxshard.commands.terminal import printable, start, working
from jaxshard.compiler.topology import check_compiler, parse_target, topology_devices
from jaxshard.plan.guard.file import Recorded, read_guard, write_guard
from jaxshard.plan.guard.guard import Guarded, check, target_name
from jaxshard.plan.guard.measure import measure, measure_text
from jaxshard.plan.guard.snapshot import Snapshot
from jaxshard.plan.guard.subject import EXPECTED, subject_of
from jaxshard.storage.paths import write_file

_TEXT = "text"
"""The name of the target of a program that is given as text."""


def run(flags: Guard) -> int:
    """Run `jaxshard guard`: record a step for each target, or check it against the file.

    Returns:
      The exit status: 1 if the step changed; else 0.
    """
    console, checks = start(flags), flags.action == "check"
    with usage_errors():
        known = read_guard(flags.file) if checks or flags.file.is_file() else Recorded("", {})
        target = flags.target or known.target
        if not target:
            raise ValueError("name what is guarded: module:function, file.py:function, or a file of HLO text")
        wanted = flags.topology.split(",") if flags.topology else list(known.snapshots) if checks else [""]
    found: list[Guarded] = []
    for name in wanted:
        with working(console, f"compiling {target}" + f" for {name}" * bool(name)):
            name, snapshot = _measure(flags, target, name, known)
        with usage_errors():
            found.append(check(name, snapshot, known.snapshots, str(flags.file)) if checks else Guarded(name, snapshot))
        if checks:
            console.print(printable(found[-1]))
    if not checks:
        now = {one.target: one.snapshot for one in found}
        with usage_errors():
            write_guard(flags.file, Recorded(target, known.snapshots | now))
        console.print(f"recorded in {flags.file}: {', '.join(now)}")
    if flags.markdown is not None:
        write_file(flags.markdown, "\n\n".join(one.markdown() for one in found).encode())
    ok = all(one.ok for one in found)
    write_json(flags.json, {"file": str(flags.file), "ok": ok, "targets": [one.as_dict() for one in found]})
    return 0 if ok else 1


def _measure(flags: Guard, target: str, name: str, known: Recorded) -> tuple[str, Snapshot]:
    """Compile the target for a topology or for the devices at hand ("cpu:8"); return (its name, its snapshot)."""
    if ":" not in target:
        with usage_errors():
            axes = dict(known.snapshots[_TEXT].mesh) if _TEXT in known.snapshots else None
            axes = read_axes(flags.mesh) if flags.mesh else axes
            return _TEXT, _measure_file(Path(target), axes)
    at_hand = re.fullmatch(r"(?:(?:cpu|gpu|tpu):(\d+))?", name)
    topology = None
    with usage_errors():
        if at_hand:
            devices = choose_devices(flags.devices or int(at_hand[1] or 0) or None)
        else:
            topology = parse_target(name)
            check_compiler(topology)
            load_compiler(topology.name, topology.num_slices)
            devices = topology_devices(topology.name, num_slices=topology.num_slices)
    with _errors_of(target):
        made = find_function(target, f"a function of a list of devices: {EXPECTED}", devices)(devices)
        with refusals():
            subject = subject_of(made, topology)
        snapshot = measure(subject, topology)
    found = target_name(subject.mesh, topology)
    if name and at_hand and found != name:
        raise UsageError(f"{name} is wanted, and the program is for {found}: run it where there are such devices")
    return found, snapshot


@contextlib.contextmanager
def _errors_of(target: str) -> Iterator[None]:
    """Print an error of the target with its traceback, and end with status 2: 1 says that the step changed."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # a target is a program, which may raise anything
        traceback.print_exc()
        raise UsageError(f"{target} does not run: {type(error).__name__}: {error}") from error


def _measure_file(file: Path, axes: dict[str, int] | None) -> Snapshot:
    """Take the snapshot of a file of HLO text."""
    text = file.read_text()
    try:
        devices = parse_program(text.encode()).devices
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if axes is None:
        raise ValueError(f"{file}: give --mesh, the sizes of its {devices} devices' mesh axes, such as data=8")
    return measure_text(text, position_mesh(axes, devices), "text")
