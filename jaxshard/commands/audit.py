"""`jaxshard audit`: compare the collectives of a compiled step with the promises of its strategy."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from rich.console import Console

from jaxshard.checks.collectives.compare import audit as audit_step
from jaxshard.checks.programs.report import audit_program
from jaxshard.commands.compiler import load_compiler
from jaxshard.commands.errors import refusals, refuse, usage_errors
from jaxshard.commands.flags import Audit
from jaxshard.commands.json_object import write_json
from jaxshard.commands.parallel import read_axes
from jaxshard.commands.prepared import prepare
from jaxshard.commands.terminal import facts, start, working
from jaxshard.compiler.topology import topology_mesh

_OF_A_STEP = (
    "engine", "schedule", "chunks", "context", "devices", "change", "batch", "seq", "remat", "precision", "topology"
)  # fmt: skip
"""Flags about how a step is compiled."""


def run(flags: Audit) -> int:
    """Run `jaxshard audit`: compare the collectives of a compiled step with the promises of its strategy.

    Returns:
      The exit status: 1 if a collective is not promised, or if a promised kind of collective was not found; else 0.
    """
    console = start(flags)
    with usage_errors():
        if flags.hlo is not None:
            return _audit_text(console, flags, flags.hlo)
        if not flags.target:
            raise ValueError("name a model or a function, such as gpt-1m or file.py:function, or give --hlo FILE")
    if flags.topology is not None:
        with refusals():
            load_compiler(flags.topology)
    prepared = prepare(flags, None if flags.topology is None else partial(topology_mesh, flags.topology))
    step = prepared.step()
    facts(console, prepared.how.shown_of_step | {"model": prepared.program.name})
    started = time.perf_counter()
    with working(console, "compiling"), refusals():
        comparison = audit_step(step, prepared.rows)
    seconds = time.perf_counter() - started
    console.print(f"\n{comparison if flags.all else comparison.short()}\n\n{comparison.verdict}")
    about = {"model": prepared.program.name, "topology": flags.topology} | prepared.how.about
    write_json(flags.json, about | comparison.as_dict() | {"compile_seconds": seconds})
    return 0 if comparison.ok else 1


def _audit_text(console: Console, flags: Audit, hlo: Path) -> int:
    """Audit the file `hlo`, the text of a compiled step; return 1 if it breaks the promises of --strategy, else 0."""
    if flags.target:
        raise ValueError(f"give {flags.target} or --hlo, not both: --hlo audits a step that is compiled already")
    compiling = {name: getattr(flags, name) for name in _OF_A_STEP}
    refuse("is of a step that is still to be compiled; --hlo reads one that is", **compiling)
    if flags.mesh is None:
        raise ValueError("--hlo needs --mesh: the axes of the mesh that the step was compiled for, such as data=8")
    text, axes = hlo.read_bytes(), read_axes(flags.mesh)
    try:
        found = audit_program(text, axes, strategy=flags.strategy, microbatches=flags.microbatches or 1)
    except ValueError as error:
        raise ValueError(f"{hlo}: {error}") from error
    console.print(f"{hlo}: {found.text(all=flags.all)}\n\n{found.outcome}")
    write_json(flags.json, {"file": str(hlo)} | found.as_dict())
    return 0 if found.ok else 1
