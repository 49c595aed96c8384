"""`jaxshard parity`: a sharded training step against the same step on one device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.text import Text

from jaxshard.checks.difference import Difference
from jaxshard.checks.parity import DIFFERS, Parity
from jaxshard.checks.parity import parity as compare
from jaxshard.commands.doctor import versions
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import ShardingFlags, check_files, check_positive, check_seed
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.pretrained import PREFIX
from jaxshard.commands.program import Program, depth_of, named_size, parse_changes, program_of
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.models.sizes import SIZES
from jaxshard.training.metrics import finite

_ROWS, _SEQ = 16, 32
"""The batch of a ready-made size: at most 512 tokens, since long sums lose digits."""


def run(
    target: str,
    *,
    change: str | None,
    sharding: ShardingFlags,
    batch: int | None,
    seed: int,
    json: Path | None,
) -> int:
    """Compare a sharded step with the same step on one device; the arguments are the flags.

    Returns:
      1 if an array differs, else 0.
    """
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_positive(batch=batch)
        check_seed(seed)
        check_files(json=json)
        how = make_parallel(sharding, depth=depth_of(target, change), batch=batch)
    program = _small_program(target, change, batch, seed, how.rows_multiple)
    facts(console, how.shown | {"model": program.name})
    started = time.perf_counter()
    with working(console, "running both"), refusals():
        report = compare(
            program.init_fn,
            program.loss_fn,
            program.tx,
            how.strategy,
            how.mesh,
            program.batch,
            engine=how.engine,
            key=seed,
        )
    seconds = time.perf_counter() - started
    last = report.headline if report.ok else f"{report.headline}: {', '.join(one.name for one in report.failures)}"
    for line in ("", *map(_style, report.table()), "", *report.remarks, Text(last, "" if report.ok else "bold red")):
        console.print(line)
    about = {"model": program.name, "seed": seed} | how.about
    write_json(json, about | _numbers(report) | {"seconds": seconds, "versions": versions()})
    return 0 if report.ok else 1


def _small_program(target: str, change: str | None, batch: int | None, seed: int, rows_multiple: int) -> Program:
    """The program; a ready-made size has a small batch."""
    if target not in SIZES and not target.startswith(PREFIX):
        return program_of(target, change=change, rows=batch)
    rows, changes = batch or _ROWS + -_ROWS % rows_multiple, parse_changes(change)
    with usage_errors():
        size = named_size(target)
    seq = None if "seq" in changes else min(_SEQ, size.shape["seq"])
    return program_of(target, change=change, rows=rows, seq=seq, seed=seed, rows_multiple=rows_multiple)


def _style(line: str) -> Text:
    """A line of the table; one about an array that differs stands out."""
    return Text(line, "bold red" if line.endswith(DIFFERS) else "")


def _numbers(report: Parity) -> dict[str, Any]:
    losses = [finite(loss) for loss in report.losses]
    return {
        "ok": report.ok,
        "loss": {"sharded": losses[0], "one_device": losses[1]},
        "arrays": [_array(one) for one in report.differences],
        "failures": [one.name for one in report.failures],
        "why": list(report.why),
        "notes": list(report.notes),
        "batches": list(report.batches),
    }


def _array(one: Difference) -> dict[str, Any]:
    return {
        "what": one.what,
        "leaf": one.leaf,
        "difference": finite(one.error),
        "allowed": one.allowed,
        "ok": one.ok,
    }
