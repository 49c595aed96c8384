"""Compile a program for a target, and take the snapshot of what it communicates, needs and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxshard.checks.programs.arguments import OTHER, Argument, Splits, lowered_splits, read_arguments
from jaxshard.checks.programs.live import live_arrays
from jaxshard.checks.programs.moves import SCALAR, Move, find_moves
from jaxshard.checks.programs.text import parse_program
from jaxshard.compiler.dump import Assignment
from jaxshard.compiler.judge import judge
from jaxshard.compiler.topology import Target
from jaxshard.core.installed import installed_version
from jaxshard.core.settings import own_settings
from jaxshard.cost.flops import jaxpr_flops
from jaxshard.hlo.counts import grouped, total
from jaxshard.hlo.instructions import rematerialized
from jaxshard.plan.compiled.known import shapes_of_arguments
from jaxshard.plan.guard.snapshot import Given, Live, Moved, Snapshot
from jaxshard.plan.guard.subject import Subject

_LIVE = 8
"""The number of arrays at the peak that are kept."""


def measure(subject: Subject, target: Target | None) -> Snapshot:
    """Compile a traced program and take its snapshot.

    Args:
      subject: the program.
      target: the topology, whose compiler is stopped as soon as memory is assigned; None for the devices at hand.

    Raises:
      ImportError: the compiler of the target is not installed.
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason than memory.
    """
    with own_settings(subject.mesh):
        lowered = subject.traced.lower()
        if target is None:
            compiled = lowered.compile()
            text, refusal, assignment, peak = compiled.as_text() or "", "", None, _bytes_at_hand(compiled)
        else:
            answer = judge(lowered, target)
            text, refusal, assignment = answer.text, answer.refusal, answer.assignment
            peak = None if assignment is None else assignment.peak
    name = compiler_name(subject.mesh)
    if refusal:
        return Snapshot(mesh=dict(subject.mesh.shape), compiler=name, refusal=refusal)
    snapshot = measure_text(text, subject.mesh, name, assignment, lowered_splits(lowered.as_text()))
    return replace(snapshot, peak_bytes=peak, flops=_flops(subject), programs=subject.programs)


def measure_text(
    text: str,
    mesh: Mesh,
    compiler: str,
    assignment: Assignment | None = None,
    splits: Mapping[int, Splits] | None = None,
) -> Snapshot:
    """Take the snapshot of a compiled program that is given as HLO text; its peak and FLOPs are not known."""
    module = parse_program(text.encode())
    arguments = read_arguments(module, mesh, splits)
    return Snapshot(
        mesh=dict(mesh.shape),
        compiler=compiler,
        collectives=tuple(sorted(_moved(find_moves(module, mesh, arguments)), key=str)),
        arguments=tuple(sorted(_given(arguments))),
        live=tuple(_live(arguments, text, assignment)),
        rematerialized_bytes=sum(one.bytes or 0 for one in rematerialized(text)),
        instructions=sum(len(one.lines) for one in module.computations.values()),
    )


def compiler_name(mesh: Mesh) -> str:
    """Return platform, chip and versions of the compiler of a mesh, such as "tpu, TPU v5 lite, libtpu 0.0.42"."""
    device = mesh.devices.flat[0]
    package = "libtpu" if device.platform == "tpu" else "jaxlib"
    kind = f", {device.device_kind}" if device.device_kind != device.platform else ""
    return f"{device.platform}{kind}, {package} {installed_version(package)}"


def _bytes_at_hand(compiled: jax.stages.Compiled) -> int | None:
    """Return the bytes of arguments, results and temporaries: CPUs report no peak of their own."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + results + found.temp_size_in_bytes)


def _flops(subject: Subject) -> int | None:
    try:
        return jaxpr_flops(subject.traced.jaxpr.jaxpr)
    except ValueError:  # a loop or kernel that does not say how much it computes
        return None


def _moved(moves: Iterable[Move]) -> Iterable[Moved]:
    groups = grouped(moves, lambda move: (move.axes, move.kind, move.what, move.arrays[0]))
    for (axes, kind, what, array), of in groups.items():
        if what == SCALAR:
            continue
        lines = grouped(of, lambda move: move.place)
        line = max(sorted(lines), key=lambda place: total(one.bytes for one in lines[place]) or 0)
        waited = total(one.bytes for one in of if one.synchronous)
        yield Moved(
            "+".join(axes), kind, what, _array(*array),
            total(one.count for one in of), total(one.bytes for one in of), waited, short_line(line),
        )  # fmt: skip


def _given(arguments: Iterable[Argument]) -> Iterable[Given]:
    groups = grouped(arguments, lambda one: (one.role, one.dtype, one.global_shape, one.splits))
    for (role, dtype, shape, splits), of in groups.items():
        split = "?" if splits is None else ",".join("+".join(axes) or "-" for axes in splits)
        yield Given(role, _array(dtype, shape), split, len(of), sum(one.bytes for one in of), of[0].name)


def _live(arguments: Sequence[Argument], text: str, assignment: Assignment | None) -> Iterable[Live]:
    """List the largest arrays at the peak; where the compiler does not tell them, the largest arguments."""
    if assignment is None:
        largest = sorted((one for one in arguments if one.role != OTHER), key=lambda one: (-one.bytes, one.name))
        return [Live(one.role, _array(one.dtype, one.shape), 1, one.bytes, one.name) for one in largest[:_LIVE]]
    found, _ = live_arrays(assignment, text, shapes_of_arguments(arguments))
    roles = {one.name: one.role for one in arguments}
    return [
        Live(
            roles.get(one.what, one.role), _array(one.dtype, one.shape), one.count, one.bytes,
            short_line(one.source or one.what),
        )
        for one in found[:_LIVE]
    ]  # fmt: skip


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def short_line(line: str) -> str:
    """Shorten the path of a source line: relative to the current folder, or below site-packages."""
    path = line.removeprefix("near ")
    own, near = Path(path), line[: -len(path)]
    if not own.is_absolute():
        return line
    if "site-packages" in own.parts:
        shown = path.rpartition("site-packages/")[2]
    else:
        shown = str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else Path(*own.parts[-2:]))
    return near + shown
