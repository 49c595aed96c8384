"""`jaxshard audit`: what a compiled step communicates, against what the strategy promises."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxshard.checks.collectives.compare import audit as audit_step
from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.programs.report import audit_program
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_files, check_positive, refuse
from jaxshard.commands.parallel import Topology, parse_axes
from jaxshard.commands.prepared import prepare
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working


def run(
    target: str | None,
    *,
    hlo: Path | None,
    change: str | None,
    sharding: ShardingFlags,
    batch: int | None,
    seq: int | None,
    remat: str | None,
    precision: PrecisionName | None,
    topology: str | None,
    all: bool,
    json: Path | None,
) -> int:
    """Compare the collectives of a compiled step with the promised ones; the arguments are the flags.

    Returns:
      1 if there is a collective that was not promised, or a promised kind that could not be read, else 0.
    """
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_files(json=json)
        if hlo is not None:
            _refuse_others(
                target,
                sharding,
                change=change,
                batch=batch,
                seq=seq,
                remat=remat,
                precision=precision,
                topology=topology,
            )
            return _audit_text(hlo, sharding, json, all)
        if target is None:
            raise ValueError("name a model or a function, such as gpt-1m or file.py:function, or give --hlo FILE")
    chips = None if topology is None else Topology(topology)
    prepared = prepare(
        target,
        change=change,
        sharding=sharding,
        batch=batch,
        seq=seq,
        remat=remat,
        precision=precision,
        topology=chips,
    )
    step = prepared.step()
    facts(console, prepared.how.shown | {"model": prepared.program.name})
    started = time.perf_counter()
    with working(console, "compiling"), refusals():
        comparison = audit_step(step, prepared.rows)
    seconds = time.perf_counter() - started
    console.print(f"\n{comparison if all else comparison.short()}\n\n{comparison.verdict}")
    about = {"model": prepared.program.name, "topology": topology} | prepared.how.about
    numbers = about | _numbers(comparison) | {"compile_seconds": seconds}
    write_json(json, numbers)
    return 0 if comparison.ok else 1


def _refuse_others(target: str | None, sharding: ShardingFlags, **flags: Any) -> None:
    """Raise ValueError for what would have a say in how a step is compiled."""
    if target is not None:
        raise ValueError(f"give {target} or --hlo, not both: --hlo audits a step that is compiled already")
    own = {name: getattr(sharding, name) for name in ("engine", "schedule", "chunks", "context", "devices")}
    refuse("is of a step that is still to be compiled; --hlo reads one that is", **own, **flags)
    check_positive(microbatches=sharding.microbatches)
    if sharding.mesh is None:
        raise ValueError("--hlo needs --mesh: the axes of the mesh that the step was compiled for, such as data=8")


def _audit_text(hlo: Path, sharding: ShardingFlags, json: Path | None, all: bool) -> int:
    """Audit the text of a compiled step; 1 where a strategy is named and broken, else 0."""
    assert sharding.mesh is not None
    console = make_console(stderr=str(json) == "-")
    text, axes = hlo.read_bytes(), parse_axes(sharding.mesh)
    try:
        found = audit_program(text, axes, strategy=sharding.strategy, microbatches=sharding.microbatches or 1)
    except ValueError as error:
        raise ValueError(f"{hlo}: {error}") from error
    console.print(f"{hlo}: {found.text(all=all)}\n\n{found.outcome}")
    write_json(json, {"file": str(hlo)} | found.as_dict())
    return 0 if found.ok else 1


def _numbers(comparison: Comparison) -> dict[str, Any]:
    return comparison.as_dict() | {
        "collectives": comparison.rows(),
        "promised_bytes": comparison.promised_bytes,
        "found_bytes": comparison.found_bytes,
        "needed_bytes": comparison.needed_bytes,
        "widened_bytes": comparison.widened_bytes,
    }
