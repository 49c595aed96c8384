"""`jaxshard audit`: what a compiled step communicates, against what the strategy promises."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.collectives.compare import audit as audit_step
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_files
from jaxshard.commands.parallel import Topology
from jaxshard.commands.prepared import prepare
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.plan.repair.repair import repair as find_repairs


def run(
    target: str,
    *,
    change: str | None,
    sharding: ShardingFlags,
    batch: int | None,
    seq: int | None,
    remat: str | None,
    precision: PrecisionName | None,
    topology: str | None,
    repair: bool,
    json: Path | None,
) -> int:
    """Compare the collectives of a compiled step with the promised ones; the arguments are the flags.

    Returns:
      1 if there is a collective that was not promised, else 0.
    """
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_files(json=json)
    chips = None if topology is None else Topology(topology)
    prepared = prepare(
        target, change=change, sharding=sharding, batch=batch, seq=seq, remat=remat, precision=precision, topology=chips,
        values=repair,
    )  # fmt: skip
    step = prepared.step()
    facts(console, prepared.how.shown | {"model": prepared.program.name})
    started = time.perf_counter()
    with working(console, "compiling"), refusals():
        comparison = audit_step(step, prepared.rows)
    seconds = time.perf_counter() - started
    console.print(f"\n{comparison}\n\n{_verdict(comparison)}")
    about = {"model": prepared.program.name, "topology": topology} | prepared.how.about
    numbers = about | _numbers(comparison) | {"compile_seconds": seconds}
    if repair:
        with working(console, "looking for edits"), refusals():
            init_fn, loss_fn, tx, values, _ = prepared.program
            how = prepared.how
            repairs = find_repairs(init_fn, loss_fn, tx, how.strategy, how.mesh, values, engine=how.engine)
        console.print(f"\n{repairs}")
        numbers |= repairs.as_dict()
    write_json(json, numbers)
    return 0 if comparison.ok else 1


def _verdict(comparison: Comparison) -> str:
    count = len(comparison.surprises)
    return f"{count} surprise{'s' * (count > 1)}" if count else "as promised"


def _numbers(comparison: Comparison) -> dict[str, Any]:
    return {
        "ok": comparison.ok,
        "collectives": comparison.rows(),
        "surprises": [surprise.as_dict() for surprise in comparison.surprises],
        "missing": list(comparison.missing),
        "substitutes": list(comparison.substitutes),
        "tolerated_bytes": comparison.tolerated,
    } | (comparison.program.as_dict() if comparison.program else {})
