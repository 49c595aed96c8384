"""`jaxshard audit`: what a compiled step communicates, against what the strategy promises."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.collectives.compare import audit as audit_step
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_files
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.program import depth_of, program_of
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.tree import abstract
from jaxshard.plan.repair.repair import repair as find_repairs
from jaxshard.training.batch import check_batch
from jaxshard.training.step import make_step


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
        how = make_parallel(
            sharding, remat=remat, precision=precision, topology=topology, depth=depth_of(target, change), batch=batch
        )
    program = program_of(target, change=change, rows=batch, seq=seq, rows_multiple=how.rows_multiple)
    rows = abstract(program.batch)
    with usage_errors(), refusals():
        layout = make_layout(how.strategy, how.mesh, program.init_fn, program.tx)
        check_batch(layout, rows, how.engine.microbatches)
        step = make_step(program.loss_fn, program.tx, layout, engine=how.engine)
    facts(console, how.shown | {"model": program.name})
    started = time.perf_counter()
    with working(console, "compiling"), refusals():
        comparison = audit_step(step, rows)
    seconds = time.perf_counter() - started
    console.print(f"\n{comparison}\n\n{_verdict(comparison)}")
    about = {"model": program.name, "topology": topology} | how.about
    numbers = about | _numbers(comparison) | {"compile_seconds": seconds}
    if repair:
        with working(console, "looking for edits"), refusals():
            init_fn, loss_fn, tx, values, _ = program
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
